"""The advantage estimators, one file for each idea; `advantages.py` names them."""
