"""The policy losses, one file each; `policy_losses.py` names them."""
