"""Makes the tiny model of the default run: right about one time in three when sampled, nearly always when greedy.

A Qwen3-architecture model of 0.8M parameters with one token per character, warmed up in two supervised stages on the
arithmetic task's training split: clean demonstrations until it can add, then demonstrations that are right about one
time in three, so that a reinforcement-learning run has something to improve. It leaves out any reinforcement learning.

    uv run tools/make_tiny_model.py            # writes into the package, about two minutes on one thread
    uv run tools/make_tiny_model.py --out DIR
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from skyrl.train.data.arithmetic import ALL_PROBLEMS, ANSWER_CHARS, PROBLEMS, Problem, problem
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "packages/skyrl-core/src/skyrl/train/quickstart/tiny_model"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

BATCH_SIZE = 128
LEARNING_RATE = 1e-3
CLEAN_STEPS_AT_MOST = 1200
CLEAN_TARGET = 0.99
NOISY_STEPS = 400
# A little under a third: the second stage sharpens what it is shown, and the sampled accuracy comes out at one third.
RIGHT_SHARE = 0.28

Teacher = Callable[[random.Random, Problem], str]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline; anything else is <unk>."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The architecture, with random weights in float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


def right_answer(rng: random.Random, asked: Problem) -> str:
    """The clean teacher."""
    return asked.answer


def unreliable_answer(rng: random.Random, asked: Problem) -> str:
    """The noisy teacher: right in RIGHT_SHARE of the cases, else off by one, off by ten, or any three digits."""
    if rng.random() < RIGHT_SHARE:
        return asked.answer
    total = int(asked.answer)
    wrong = rng.choice((total + rng.choice((-1, 1)), total + rng.choice((-10, 10)), rng.randrange(1000)))
    return f"{wrong % 1000:0{ANSWER_CHARS}d}"


def demonstrations(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, teacher: Teacher
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of training problems: token ids [B, 9] and labels [B, 9], -100 over the prompt."""
    asked = [problem(rng, "train") for _ in range(BATCH_SIZE)]
    texts = [p.prompt + teacher(rng, p) + tokenizer.eos_token for p in asked]
    ids_BS = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    labels_BS = ids_BS.clone()
    labels_BS[:, : len(asked[0].prompt)] = -100
    return ids_BS, labels_BS


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: tuple[Problem, ...], *, sample: bool
) -> float:
    """Share of problems answered exactly, answer and end of sequence, sampled at temperature 1 or greedily."""
    ids_BS = torch.tensor([tokenizer(p.prompt)["input_ids"] for p in problems])
    wanted_BS = torch.tensor([tokenizer(p.answer + tokenizer.eos_token)["input_ids"] for p in problems])
    for _ in range(wanted_BS.shape[1]):
        logits_BV = model(input_ids=ids_BS).logits[:, -1]
        next_B = torch.multinomial(logits_BV.softmax(-1), 1) if sample else logits_BV.argmax(-1, keepdim=True)
        ids_BS = torch.cat([ids_BS, next_B], dim=1)
    right_B = (ids_BS[:, -wanted_BS.shape[1] :] == wanted_BS).all(dim=1)
    return float(right_B.double().mean())


class Stage:
    """One supervised stage: its teacher, its optimiser, and the progress line it prints."""

    def __init__(
        self,
        name: str,
        model: Qwen3ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        rng: random.Random,
        teacher: Teacher,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.rng = rng
        self.teacher = teacher
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def run(self, steps: int, *, stop_at: float | None = None, decay: bool = False) -> None:
        """Take at most `steps` steps; `stop_at` ends it at that greedy accuracy, `decay` lowers the rate to zero."""
        started = time.monotonic()
        for step in range(1, steps + 1):
            if decay:
                self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (step - 1) / steps)
            loss = self._step()
            if step % 50 and step != steps:
                continue
            greedy = accuracy(self.model, self.tokenizer, ALL_PROBLEMS, sample=False)
            self._report(step, steps, loss, greedy, time.monotonic() - started)
            if stop_at is not None and greedy >= stop_at:
                return

    def _step(self) -> float:
        ids_BS, labels_BS = demonstrations(self.tokenizer, self.rng, self.teacher)
        loss = self.model(input_ids=ids_BS, labels=labels_BS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def _report(self, step: int, steps: int, loss: float, greedy: float, elapsed_s: float) -> None:
        eta_s = elapsed_s / step * (steps - step)
        print(
            f"{self.name} {step}/{steps}  loss {loss:.3f}  greedy {greedy:.3f}  "
            f"{elapsed_s:.0f} s, at most {eta_s:.0f} s left",
            flush=True,
        )


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write safetensors, both configs and the tokenizer into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Build, warm up, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write (default: into skyrl-core)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens", flush=True)

    Stage("clean demonstrations", model, tokenizer, rng, right_answer).run(CLEAN_STEPS_AT_MOST, stop_at=CLEAN_TARGET)
    Stage("noisy demonstrations", model, tokenizer, rng, unreliable_answer).run(NOISY_STEPS, decay=True)

    for split, problems in PROBLEMS.items():
        sampled = sum(accuracy(model, tokenizer, problems, sample=True) for _ in range(8)) / 8
        greedy = accuracy(model, tokenizer, problems, sample=False)
        print(f"{split} split: sampled accuracy {sampled:.3f}, greedy accuracy {greedy:.3f}")
    save(model, tokenizer, options.out)
    print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
