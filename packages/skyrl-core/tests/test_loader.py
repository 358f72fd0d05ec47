"""Whether the order of prompts is a seeded shuffle that resumes exactly."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skyrl.train.data.loader import PromptLoader
from skyrl.train.data.prompts import PromptDataset
from skyrl.train.generator.chat import ChatFormat


@pytest.fixture(scope="module")
def dataset(tiny_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": str(i)}]}) + "\n" for i in range(23)))
    return PromptDataset([path], ChatFormat(tiny_tokenizer), max_prompt_length=8, default_env_class="arithmetic")


def uids(loader: PromptLoader, batches: int) -> list[list[str]]:
    return [[t.uid for t in loader.next_batch()] for _ in range(batches)]


def test_an_epoch_has_full_batches_of_distinct_prompts_and_drops_the_rest(dataset):
    loader = PromptLoader(dataset, 5, seed=1)
    assert len(loader) == 4
    seen = [uid for batch in uids(loader, 4) for uid in batch]
    assert len(seen) == len(set(seen)) == 20
    assert loader.epoch == 0
    uids(loader, 1)
    assert loader.epoch == 1


def test_each_epoch_and_each_seed_has_an_order_of_its_own(dataset):
    one, same, other = (PromptLoader(dataset, 23, seed=s) for s in (1, 1, 2))
    epochs = uids(one, 2)
    assert epochs == uids(same, 2)
    assert epochs[0] != epochs[1]
    assert epochs[0] != uids(other, 1)[0]


@settings(deadline=None, max_examples=30)
@given(batch_size=st.integers(1, 23), seed=st.integers(0, 99), before=st.integers(0, 30), after=st.integers(1, 30))
def test_a_resumed_loader_goes_on_with_the_same_prompts(dataset, batch_size, seed, before, after):
    loader = PromptLoader(dataset, batch_size, seed=seed)
    uids(loader, before)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = PromptLoader(dataset, batch_size, seed=seed)
    resumed.load_state_dict(state)
    assert uids(resumed, after) == uids(loader, after)


def test_a_state_of_other_data_seed_or_batch_size_is_refused_with_what_differs(dataset):
    state = PromptLoader(dataset, 5, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"seed: 1 in the checkpoint, 2 here; batch_size: 5 in the checkpoint, 4 here"):
        PromptLoader(dataset, 4, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="digest"):
        PromptLoader(dataset, 5, seed=1).load_state_dict(state | {"digest": "x"})


def test_fewer_rows_than_one_batch_needs_are_refused(dataset):
    with pytest.raises(ValueError, match="23 usable prompts, trainer.train_batch_size=24 needs at least as many"):
        PromptLoader(dataset, 24, seed=1)
