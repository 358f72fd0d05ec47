"""How to let a model use a tool over several turns: an environment that answers `<calc>..</calc>` with a result.

    uv run --package skyrl-core python packages/skyrl-core/examples/multi_turn_tool.py

A turn ends at a stop text, what the tool says follows as tokens that are not trained on, and nothing that the model
wrote is tokenised again. The tiny model of the default run knows no tools: it shows the way of the tokens, not a good
score.
"""

import sys
from pathlib import Path

import skyrl.train.quickstart
from skyrl.train import environments
from skyrl.train.entrypoints.main_base import main
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool

EMBEDDED = Path(skyrl.train.quickstart.__file__).parent / "embedded.yaml"


class Calculator(ToolGroup):
    """Adds numbers."""

    def __init__(self):
        super().__init__(name="calculator")

    @tool
    def add(self, text: str) -> str:
        terms = text.split("+")
        return str(sum(map(int, terms))) if all(t.strip().isdigit() for t in terms) else "not a sum"


class SumWithTool(BaseTextEnv):
    """Right at the end is 1 point; a turn without an answer asks the calculator and goes on."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.expected = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras["max_turns"]
        self.init_tool_groups([Calculator()])
        self.calls = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        asked = action.partition("<calc>")[2].partition("</calc>")[0]
        if self.expected in action or self.turns == self.max_turns:
            reward = float(self.expected in action)
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        self.calls += 1
        result = self._execute_tool("calculator", "add", [asked])
        observation = {"role": "user", "content": f"<result>{result}</result>"}
        return BaseTextEnvStepOutput(observations=[observation], reward=0.0, done=False, metadata={})

    def get_metrics(self):
        return {"tool_calls": self.calls, "turns": self.turns}


if __name__ == "__main__":
    environments.register("sum_with_tool", SumWithTool)
    main(
        [
            f"@{EMBEDDED}",
            "environment.env_class=sum_with_tool",
            "generator.max_turns=3",
            "generator.max_input_length=120",
            "generator.sampling_params.stop=['</calc>']",
            "generator.eval_sampling_params.stop=['</calc>']",
            "generator.inference_engine.engine_init_kwargs.max_model_len=160",
            "trainer.max_training_steps=5",
            "trainer.run_name=multi-turn-tool",
            *sys.argv[1:],
        ]
    )
