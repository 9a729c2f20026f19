"""From the logits of a step to the deltas of its requests. A failure for one request ends it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handlers.cpu_kernels.arguments import NO_TOKEN
from handlers.rolling_batch.device_arrays import unknown_token
from handlers.rolling_batch.request import Request
from handlers.rolling_batch.requests.live import LiveRequests
from handlers.rolling_batch.requests.token_choice import ChosenTokens, choose_tokens
from handlers.rolling_batch.runner.step_runner import StepLogits
from handlers.rolling_batch.sampling.chosen import Sampled
from handlers.rolling_batch.sampling.histories import DeviceHistories
from handlers.rolling_batch.schedule.plan import Sequence, StepPlan
from lmi_server.contract.errors import is_device_failure

if TYPE_CHECKING:
    from torch import Tensor


class RequestTokens:
    """The scores of prompts and the tokens of the requests in `live`."""

    def __init__(self, live: LiveRequests) -> None:
        self._live = live
        self._histories = DeviceHistories()  # of the requests that penalise tokens

    def prompts_to_score(self, plan: StepPlan) -> set[int]:
        """Return the numbers of the requests whose prompt tokens of this step get log probabilities."""
        return {chunk.sequence.number for chunk in plan.prefill if self._live.of(chunk.sequence).scores(chunk)}

    def score_prompts(self, logits: StepLogits) -> None:
        """Give requests the log probabilities of their prompt tokens."""
        for sequence, first, rows in logits.prompt_rows:
            try:
                self._live.of(sequence).score_prompt(first, logits.logits[rows])
            # The border to torch and to tokenizers: the prompt of one request must not end the others.
            except BaseException as error:
                if is_device_failure(error):
                    raise
                self._live.end_alone(sequence.number, error)

    def choose(self, sequences: list[Sequence], logits: Tensor, known: Tensor | None = None) -> ChosenTokens:
        """Choose the next token of each sequence from its row of logits. The host may know it later."""
        found = [self._live.get(sequence.number) for sequence in sequences]
        requests = [request for request in found if request is not None]
        if len(requests) < len(found):  # what failed above has ended them
            logits = logits[[row for row, request in enumerate(found) if request is not None]]
        chosen = choose_tokens(requests, logits, known, self._histories)
        for row, request in enumerate(requests):
            request.sequence.append(unknown_token(row))
        return chosen

    def choose_and_tell(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Choose the next token of each sequence and emit its delta."""
        self.tell(self.choose(sequences, logits))

    def tell(self, chosen: ChosenTokens) -> int:
        """Emit the delta of each request that has not ended since; return how many tokens there were."""
        count = 0
        for request, sampled in zip(chosen.requests, chosen.read(), strict=True):
            number = request.sequence.number
            if self._live.get(number) is None:
                continue
            count += 1
            if isinstance(sampled, BaseException):
                self._live.end_alone(number, sampled, sound=False)  # its token stays unknown
            elif sampled.token == NO_TOKEN:
                self._live.forget(request, sound=False)  # nothing of its slot is reused
                request.emit(request.overflow(chosen.dtype))
            else:
                self._accept(request, sampled)
        return count

    def _accept(self, request: Request, sampled: Sampled) -> None:
        """Emit the delta of a token; end the request if it is the last one."""
        try:
            delta = request.accept(sampled)
            request.emit(delta)
            if delta.finish_reason:
                self._live.forget(request)
        # A grammar may allow no token that the request's other parameters leave. All else is the border to tokenizers,
        # which may raise anything: the text of one request must not end the others.
        except BaseException as error:  # noqa: BLE001
            self._live.end_alone(request.sequence.number, error, sound=False)
