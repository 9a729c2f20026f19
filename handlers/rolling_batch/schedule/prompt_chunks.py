"""How many tokens of each prompt a step computes: chunked prefill as in Sarathi-Serve (Agrawal et al., OSDI 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from handlers.rolling_batch.schedule.page_table import PageTable
from handlers.rolling_batch.schedule.plan import Chunk, Sequence
from handlers.rolling_batch.schedule.slots import SlotTable


@dataclass(frozen=True)
class PromptChunks:
    """The sizes of chunks, in prompt tokens; see SchedulerLimits."""

    chunk_size: int
    chunk_size_when_idle: int
    prompt_bucket: int | None
    slots: SlotTable | PageTable

    def plan(self, running: SequenceOf[Sequence], decoding: int, room: int) -> Iterator[Chunk]:
        """Yield the chunks of a step beside a number of sequences that decode, as far as `room` holds them.

        The last chunk is longer than planned if an image would be cut.
        """
        budget, of_prompt = self._budget(running, decoding)
        for sequence in running:
            if budget <= 0:
                return
            if not sequence.decoding:
                # An empty chunk would get the logits of the row before it, which is another sequence's.
                assert sequence.computed < len(sequence.tokens), "the last token of a sequence was never appended"
                start = sequence.computed
                most, _ = self.slots.fit(sequence.slot, len(sequence.tokens), room)
                end = min(most, start + self._max_at_once(sequence, min(budget, of_prompt)))
                if self.slots.states is not None:
                    end = self.slots.states.end_of_chunk(sequence.slot, start, end)
                if sequence.images is not None:
                    end = sequence.images.chunk_end(start, end, most)
                if end <= start:  # there is no room yet, for an image or at all
                    continue
                budget -= end - start
                _, room = self.slots.fit(sequence.slot, end, room)
                yield Chunk(sequence, start, end)

    def _budget(self, running: SequenceOf[Sequence], decoding: int) -> tuple[int, int]:
        """Return how many prompt tokens a step computes beside a number of sequences that decode, and of one prompt.

        These sequences wait meanwhile. So it is a chunk, unless more sequences than they wait for their first token,
        after a burst of requests say: then it is so many times as much. Only short prompts count, which the larger step
        completes. A long one gets no more than a chunk of any step.
        """
        chunk, most = self.chunk_size, self.chunk_size_when_idle
        if not decoding:
            return most, most
        short = sum(not sequence.decoding and len(sequence.tokens) - sequence.computed <= chunk for sequence in running)
        return max(chunk, min(most, chunk * short // decoding)), chunk

    def _max_at_once(self, sequence: Sequence, budget: int) -> int:
        if self.prompt_bucket is None:
            return budget
        return 1 if sequence.computed else min(self.prompt_bucket, budget)


def min_chunk(sequence: Sequence) -> int:
    """Return how many tokens the next chunk of a sequence has at least."""
    return 1 if sequence.images is None else sequence.images.next_tokens(sequence.computed)
