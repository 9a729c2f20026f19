"""What the oldest form of output formatters gets: a finished answer, or the chunks of a stream, as objects.

LMI's asynchronous handler hands over vLLM's own object, and in a stream the text of each event. So an object here has
the fields of OpenAI's form beside those of LMI's, if the function looks for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

_OPENAI_FIELDS = frozenset({"choices", "created", "id", "model", "object", "usage"})
_FIELDS_OF_EVENTS = ("data:", "event:", "id:")

Completion = Callable[[str], Mapping[str, Any]]
"""Takes a text; returns the fields that it has in OpenAI's form."""


class AttributeDict(dict[str, Any]):
    """A JSON object with the attributes and methods of a pydantic model, for which LMI's users write formatters."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the object as plain values."""
        return msgspec.json.decode(msgspec.json.encode(self))  # type: ignore[no-any-return]

    def model_dump_json(self, **_: Any) -> str:
        """Return the object as JSON."""
        return msgspec.json.encode(self).decode()


def attribute_dict(value: Any) -> Any:
    """Return JSON values with attributes in the place of keys."""
    if isinstance(value, dict):
        return AttributeDict({key: attribute_dict(item) for key, item in value.items()})
    return [attribute_dict(item) for item in value] if isinstance(value, list) else value


class LmiAnswer(AttributeDict):
    """An answer in LMI's form, or an event of a stream, which has the text of a token."""

    def __init__(self, fields: Mapping[str, Any], completion: Completion) -> None:
        super().__init__(fields)
        object.__setattr__(self, "_completion", completion)

    def __getattr__(self, name: str) -> Any:
        place = self._text_place()
        if name in _OPENAI_FIELDS and name not in self and place is not None:
            self.update(attribute_dict(self._completion(place[0][place[1]])))
        return super().__getattr__(name)

    @property
    def lmi_text(self) -> str:
        """The text in LMI's form: of the token of an event, or of the answer."""
        place = self._text_place()
        return "" if place is None else str(place[0][place[1]])

    def follow_choice(self) -> None:
        """Copy the text of the first choice, which the function may have changed, to the text in LMI's form."""
        place = self._text_place()
        if "choices" in self and place is not None:
            place[0][place[1]] = self["choices"][0]["text"]

    def _text_place(self) -> tuple[dict[str, Any], str] | None:
        """Return the object and the key that hold the text; None if the answer has none."""
        token = self.get("token")
        if isinstance(token, dict) and "text" in token:
            return token, "text"
        return (self, "generated_text") if isinstance(self.get("generated_text"), str) else None


class StreamEvent(str):
    """The text of an event; its attributes are the fields of the object in it, which is parsed at the first of them."""

    _completion: Completion
    _fields: LmiAnswer | None
    _before: str

    def __new__(cls, text: str, completion: Completion) -> StreamEvent:
        event = super().__new__(cls, text)
        object.__setattr__(event, "_completion", completion)
        object.__setattr__(event, "_fields", None)
        return event

    def __getattr__(self, name: str) -> Any:
        fields = None if name.startswith(("_", "model_")) else self._parse()
        if fields is None:
            raise AttributeError(name)
        return getattr(fields, name)

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self._parse()
        if fields is None:
            raise AttributeError(f"{name}: the event holds no JSON object")
        fields[name] = value

    def write_event(self, texts: list[tuple[str, str]]) -> str:
        """Return the event with what the function changed.

        `texts` collects those of the tokens of a stream, before and after. The last event repeats all of them.
        """
        fields = self._fields
        if fields is None:
            return str(self)
        fields.follow_choice()
        texts.append((self._before, fields.lmi_text))
        whole = fields.get("generated_text")
        if "token" in fields and isinstance(whole, str):
            before, after = ("".join(parts) for parts in zip(*texts, strict=True))
            if whole.endswith(before):
                fields["generated_text"] = whole.removesuffix(before) + after
        place = self._place()
        return f"{self[: place.start]}{fields.model_dump_json()}{self[place.stop :]}"

    def _place(self) -> slice:
        """Return where the object is: from the first opening brace to the last closing one."""
        start = self.find("{")
        return slice(start, max(start, self.rfind("}") + 1)) if start >= 0 else slice(0, 0)

    def _parse(self) -> LmiAnswer | None:
        found = self[self._place()] if self._fields is None else ""
        if found:
            try:
                fields = attribute_dict(msgspec.json.decode(found))
            except msgspec.DecodeError:
                return None
            object.__setattr__(self, "_fields", LmiAnswer(fields, self._completion))
            object.__setattr__(self, "_before", LmiAnswer(fields, self._completion).lmi_text)
        return self._fields


def events(text: str) -> Iterator[str]:
    """Yield the events of a chunk, which has several of them if a step brought several tokens."""
    at, last_blank = 0, text.rfind("\n\n")
    while at < len(text):
        end = text.find("\n\n", at) + 2 if at <= last_blank and text.startswith(_FIELDS_OF_EVENTS, at) else 0
        end = end or _end_of_lines(text, at)
        yield text[at:end]
        at = end


def _end_of_lines(text: str, start: int) -> int:
    """Return where the line that begins there ends, with the blank lines behind it."""
    end = text.find("\n", start)
    while 0 <= end < len(text) and text[end] == "\n":
        end += 1
    return end if end >= 0 else len(text)
