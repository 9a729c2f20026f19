"""Output formatters in LMI's older forms, chosen by option.output_formatter."""


def with_id(token, first_token, last_token, details, generated_text, id):  # noqa: A002 - LMI's name
    assert isinstance(id, int)
    begin = "<" if first_token else ""
    end = f"|{details['finish_reason']}|{details['generated_tokens']}" if details and last_token else ""
    return f"{begin}{token.text}{f'|{generated_text}{end}>' if last_token else ''}"


def without_id(token, first_token, last_token, details, generated_text):
    return token.text.upper()


def whole(answer):
    if isinstance(answer, str):  # a chunk of a stream
        return answer.replace("generated_text", "text")
    return {"answer": answer.generated_text, "also": answer["generated_text"]}


async def asynchronous(answer):
    return answer
