"""Speech to text: sounds are written down window by window, so that a long one does not stall the others.

transcription.py    one sound on its way to a text
recognition.py      the task: models of transformers' pipeline, and Whisper in chunks that overlap
whisper.py          Whisper by its sequential algorithm, a window of several sounds per step
segments.py         the segments that Whisper finds in a window, and their scores
service.py          takes requests concurrently, and gives each its turn
"""
