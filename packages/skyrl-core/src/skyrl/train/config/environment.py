"""Which environment scores a rollout, and what the environments need (`environment.*`)."""

from __future__ import annotations

from typing import Literal

from skyrl.train.config.part import ConfigPart, Texts, key, section


class Text2SQLConfig(ConfigPart):
    """`environment.skyrl_gym.text2sql.*`."""

    db_path: str = key("/home/ray/default/sql_data", "Folder of the SQLite databases.")


class LLMJudgeConfig(ConfigPart):
    """`environment.skyrl_gym.llm_as_a_judge.*`."""

    model: str = key("gpt-4o-mini", "Model that judges an answer.")
    base_url: str | None = key(None, "Address of the judge's OpenAI-style API.")


class SearchConfig(ConfigPart):
    """`environment.skyrl_gym.search.*`."""

    log_requests: bool = key(False, "Log each retrieval.")
    search_url: str = key("http://127.0.0.1:8000/retrieve", "Address of the retrieval server.")
    topk: int = key(3, "Documents per query.", ge=1)
    timeout: int = key(30, "Seconds to wait for one retrieval.", ge=1)


class SkyRLGymConfig(ConfigPart):
    """`environment.skyrl_gym.*`: an environment gets the sub-section named as itself."""

    max_env_workers: int = key(32, "Threads that step environments.", ge=1)
    text2sql: Text2SQLConfig = section(Text2SQLConfig)
    llm_as_a_judge: LLMJudgeConfig = section(LLMJudgeConfig)
    search: SearchConfig = section(SearchConfig)


class EnvironmentConfig(ConfigPart):
    """`environment.*`."""

    env_class: str = key("gsm8k", "Environment of rows that name none.")
    plugins: Texts = key(
        (),
        "Modules to import first in the trainer and in every worker; each registers environments, losses or estimators "
        "(an addition of this project).",
    )
    reward: str | None = key(
        None,
        "module:function that scores every response instead of an environment, as score(prompt, response, extras) -> "
        "a number or a mapping (an addition).",
    )
    on_error: Literal["stop", "drop"] = key(
        "stop",
        "What an environment that raises, hangs or gives no number does: end the run, or cost that sample, which is "
        "named in the log and counted (an addition).",
    )
    step_timeout_s: float = key(300.0, "Seconds that an environment may take for one call (an addition).", gt=0)
    skyrl_gym: SkyRLGymConfig = section(SkyRLGymConfig)
