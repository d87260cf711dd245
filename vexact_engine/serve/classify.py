"""POST /classify: scores of texts, as vLLM's server has it, of a model that scores sequences."""

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from ..classify import Classification
from .answers import as_json
from .errors import APIError
from .generation import Generation
from .protocol import ClassifyRequest, parse


class Classifying(Generation):
    """One request for scores, from its body to the last byte of its answer."""

    def __init__(self, service: Any, request: Request):
        super().__init__(service, request, chat=False)
        self.id, self.endpoint = f"classify-{secrets.token_hex(16)}", "classify"

    async def _work(self, raw: bytes, send) -> None:
        service = self.service
        if service.engine.labels is None:
            message = "this model generates: expected one that scores sequences (...ForSequenceClassification)"
            raise APIError(400, message, code="not_a_classifier")
        asked = parse(ClassifyRequest, raw)
        model = service.check_model(asked.model)
        jobs = await service.prompts.of_input(asked)
        self.given_id = asked.request_id
        self.names = [f"{self.id}-{index}" for index in range(len(jobs))]
        self._check_begin()
        found = await service.engine.aclassify([job.prompt_ids for job in jobs], request_ids=self.names)
        for one in found:
            self._check_scores(one)
        self.prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
        service.metrics.prompt_tokens.inc(self.prompt_tokens)
        self._whole, self.outcome = True, "ok"
        activate = activation(service.engine.model.config, asked.use_activation is not False)
        data = [
            {
                "index": index, "label": one.label, "probs": activate(one.scores), "num_classes": len(one.scores),
                "weight_version": one.weight_version,
            }
            for index, one in enumerate(found)
        ]  # fmt: skip
        tokens = self.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
        answer = {
            "id": self.id, "object": "list", "created": int(time.time()), "model": model, "data": data, "usage": usage,
            "system_fingerprint": service.fingerprint,
        }  # fmt: skip
        await self._send(send, 200, as_json(answer))

    def _check_scores(self, done: Classification) -> None:
        if done.aborted:
            raise APIError(503, "it was aborted before it had scores", code="aborted", retry=5)
        if not done.scores:
            raise APIError(500, done.error or "failed", code="classification_failed")


def activation(config: Any, wanted: bool):
    """What scores go through where that is wanted: as the config's problem_type says, else softmax, or sigmoid of a
    single one. In float64."""
    kind = getattr(config, "problem_type", None)
    if not wanted or kind == "regression":
        return list
    if kind == "multi_label_classification" or (kind is None and config.num_labels == 1):
        return lambda scores: [_sigmoid(x) for x in scores]
    return _softmax


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softmax(scores: Sequence[float]) -> list[float]:
    most = max(scores)
    parts = [math.exp(x - most) for x in scores]
    return [part / sum(parts) for part in parts]
