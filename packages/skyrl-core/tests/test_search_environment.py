"""Whether skyrl-gym's search environment asks the service that the configuration names, as often and for as much."""

from search_service import search_service
from skyrl.train import environments
from skyrl.train.config import SkyRLTrainConfig


def environment(url: str, **settings: object):
    cfg = SkyRLTrainConfig.model_validate(
        {"environment": {"skyrl_gym": {"search": {"search_url": url, "timeout": 5, **settings}}}}
    )
    extras = {"reward_spec": {"ground_truth": {"target": ["Paris"]}}, "max_turns": 3}
    return environments.make("search", env_config=cfg.environment.skyrl_gym.search, extras=extras)


def test_a_query_between_the_tags_is_answered_by_the_service():
    with search_service() as service:
        env = environment(service.url, topk=2)
        out = env.step("I wonder <search> capital of France </search>")
        assert service.requests == [{"query": "capital of France", "topk": 2, "return_scores": True}]
        (observation,) = out["observations"]
        assert "Doc 1: capital of France is 0" in observation["content"]
        assert "Doc 2: capital of France is 1" in observation["content"]
        assert (out["done"], out["reward"]) == (False, 0)
        last = env.step("<answer>Paris</answer>")
        assert (last["done"], last["reward"]) == (True, 1.0)


def test_a_service_that_fails_once_is_asked_again():
    with search_service() as service:
        service.failures = 1
        out = environment(service.url, topk=1).step("<search>x</search>")
        assert len(service.requests) == 2 and "x is 0" in out["observations"][0]["content"]
