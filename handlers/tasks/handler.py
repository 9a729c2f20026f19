"""The pipeline handler: tasks of Hugging Face models, as transformers runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handlers.tasks.options import SPEECH_RECOGNITION, PipelineOptions
from handlers.tasks.task_handler import TaskHandler
from lmi_server.contract.handler import AsyncRequestHandler
from lmi_server.processes import model_imports

if TYPE_CHECKING:
    from handlers.tasks.task import Task


class PipelineHandler(TaskHandler):
    """Serves one task of one model, which runs in the worker."""

    def load_task(self, task: str, model_dir: str, options: PipelineOptions) -> Task:
        with model_imports.importing():
            from handlers.checkpoints.transformers_loading import set_threads
            from handlers.tasks.task_loading import load_task

        set_threads(options.threads)
        return load_task(task, options.model_id or model_dir, options)

    def concurrent_handler(self) -> AsyncRequestHandler | None:
        if self._name != SPEECH_RECOGNITION:
            return None
        from handlers.tasks.speech.recognition import SpeechRecognition
        from handlers.tasks.speech.service import SpeechService

        assert isinstance(self.task, SpeechRecognition), "it is the task of this name"
        return SpeechService(self, self.task)
