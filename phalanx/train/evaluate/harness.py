"""Adapter from our models to lm-evaluation-harness; imported only where that is installed."""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from phalanx.config import ConfigError
from phalanx.train.evaluate.generate import Sampling
from phalanx.train.evaluate.rows import request, rolling
from phalanx.train.evaluate.score import Scorer
from phalanx.train.evaluate.text import TextCodec

MOST_TOKENS = 256  # that a task which says no number has written


class HarnessModel(TemplateLM):
    """Answers the harness's three kinds of requests like its Hugging Face model class."""

    def __init__(self, scorer: Scorer, codec: TextCodec) -> None:
        super().__init__()
        self.scorer, self.codec = scorer, codec

    @property
    def eot_token_id(self) -> int:
        return self.codec.end

    @property
    def prefix_token_id(self) -> int:
        return self.codec.start

    @property
    def tokenizer_name(self) -> str:
        return str(self.codec.path)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Tokens of a text; one that starts with the BOS token gets no second one."""
        begun = string.startswith(self.codec.decode([self.codec.start], special=True))
        special = not begun if add_special_tokens is None else add_special_tokens
        return self.codec.encode(string, special=special)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        sequence = self.scorer.sequence
        asked = [request(context, scored, sequence) for _, context, scored in requests]
        return [(found.log_probability, found.greedy) for found in self.scorer.score(asked)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [
            list(rolling(self.tok_encode(each.args[0]), self.codec.start, self.scorer.sequence))
            for each in requests
        ]
        scores = iter(self.scorer.score([window for text in texts for window in text]))
        return [sum(next(scores).log_probability for _ in text) for text in texts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        written: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for number, each in enumerate(requests):
            groups.setdefault(repr(each.args[1]), []).append(number)
        for numbers in groups.values():
            texts = self._generate(
                [requests[i].args[0] for i in numbers], requests[numbers[0]].args[1]
            )
            written |= zip(numbers, texts, strict=True)
        return [written[number] for number in range(len(requests))]

    def _generate(self, contexts: list[str], wanted: dict[str, Any]) -> list[str]:
        settings = normalize_gen_kwargs(wanted, MOST_TOKENS)
        end = self.codec.decode([self.codec.end], special=True)
        stops = handle_stop_sequences(settings.pop("until", None), eos=end)
        sampling = Sampling(
            most_tokens=settings["max_gen_toks"],
            temperature=settings["temperature"] if settings["do_sample"] else 0.0,
            top_p=settings.get("top_p", 1.0),
            stops=tuple(stops),
        )
        left = self.scorer.sequence - sampling.most_tokens
        if left < 1:
            rule = f"the model sees {self.scorer.sequence} tokens, and a task writes as many"
            fix = "give --sequence, or lower max_gen_toks in the task"
            raise ConfigError("max_gen_toks", sampling.most_tokens, rule, fix)
        prompts = [self.tok_encode(context)[-left:] for context in contexts]
        texts = [self.codec.decode(text) for text in self.scorer.generate(prompts, sampling)]
        return [postprocess_generated_text(text, stops, None) for text in texts]
