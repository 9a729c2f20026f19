"""OpenAI's speech to text, /v1/audio/transcriptions and /v1/audio/translations: forms in, texts and subtitles out.

request.py    a form with the file of a sound -> LMI's request for automatic-speech-recognition
answer.py     LMI's result -> JSON, text, SRT or WebVTT, or the events of a stream
"""

from lmi_server.dialects import routes
from lmi_server.dialects.optional import OptionalDialect, Translation
from lmi_server.dialects.speech.answer import EventWriter, write_answer
from lmi_server.dialects.speech.request import BODY, refuse_generation, speech_error, speech_request

DIALECT = OptionalDialect(
    summaries={
        routes.AUDIO_TRANSCRIPTIONS: "OpenAI: write down what is said in a sound",
        routes.AUDIO_TRANSLATIONS: "OpenAI: write down in English what is said in a sound",
    },
    paths={f"/v1/{route}": route for route in sorted(routes.AUDIO_ROUTES)},
    parsers=dict.fromkeys(routes.AUDIO_ROUTES, refuse_generation),
    translations=dict.fromkeys(
        routes.AUDIO_ROUTES, Translation(speech_request, write_answer, stream=EventWriter, error=speech_error)
    ),
    bodies=dict.fromkeys(routes.AUDIO_ROUTES, BODY),
    body_types=dict.fromkeys(routes.AUDIO_ROUTES, ("multipart/form-data",)),
)
