"""Directories of small random models, one for each task."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from model_directories import write_properties
from tiny_models import byte_tokenizer, saved_model, tiny_model
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CONTEXT = 64
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = ["the", "fox", "jumps", "over", "dog", "red", "blue", "who", "example", "this", "is"]
VOCABULARY = [*_SPECIAL, *_WORDS, *string.ascii_lowercase, *string.digits, *".,?!'-:"]
VOCABULARY += [f"##{letter}" for letter in string.ascii_lowercase + string.digits]
_BERT = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
SAMPLING_RATE = 16000


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer like BERT's, of a few words and all letters."""
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name.strip('[]').lower()}_token": name for name in _SPECIAL},
    )


def _save(model_class: str, config: Any, directory: Path, likely: Sequence[int] = ()) -> None:
    """Save a random model; the tokens that are `likely` come more often than others."""
    torch.manual_seed(7)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower():
                parameter.normal_(std=0.3)
        if likely:
            model.get_output_embeddings().weight[list(likely)] *= 3
    model.eval().save_pretrained(directory)


def _bert(model_class: str, **more: Any) -> Callable[[Path], None]:
    def save(directory: Path) -> None:
        _save(model_class, transformers.BertConfig(**_BERT, **more), directory)
        word_tokenizer().save_pretrained(directory)

    return save


def _labels(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def sentence_transformer(directory: Path, pooling: str = "mean", max_length: int = CONTEXT) -> None:
    """Save an embedding model in the layout of sentence-transformers."""
    _bert("BertModel")(directory)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (directory / "modules.json").write_text(
        json.dumps(
            [
                {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for index, (path, kind) in enumerate(modules)
            ]
        )
    )
    (directory / "1_Pooling").mkdir()
    flags = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    flags |= {"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens"}
    modes = {f"pooling_mode_{flag}": mode == pooling for mode, flag in flags.items()}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    (directory / "2_Normalize").mkdir()


def _tapas(directory: Path) -> None:
    config = transformers.TapasConfig(**_BERT, type_vocab_sizes=[3, 256, 256, 2, 256, 256, 10], select_one_column=True)
    _save("TapasForQuestionAnswering", config, directory)
    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join([*VOCABULARY, "[EMPTY]"]))
    transformers.TapasTokenizer(str(vocabulary), model_max_length=CONTEXT).save_pretrained(directory)


def seq2seq_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 258)]
    )
    return tokenizer


def _t5(directory: Path) -> None:
    config = transformers.T5Config(
        vocab_size=259,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        pad_token_id=257,
        eos_token_id=258,
        decoder_start_token_id=257,
        task_specific_params={
            "translation_en_to_de": {"prefix": "translate: ", "max_length": 12},
            "summarization": {"prefix": "summarize: ", "max_length": 10, "num_beams": 2},
        },
    )
    _save("T5ForConditionalGeneration", config, directory)
    seq2seq_tokenizer().save_pretrained(directory)


def _vit(directory: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        **_labels("cat", "dog", "fox"),
    )
    _save("ViTForImageClassification", config, directory)
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(directory)


def _wav2vec2(directory: Path) -> None:
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(16, 16),
        conv_kernel=(10, 5),
        conv_stride=(20, 16),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        pad_token_id=0,
    )
    _save("Wav2Vec2ForCTC", config, directory)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *string.ascii_uppercase, "'"]
    vocabulary = directory / "vocab.json"
    vocabulary.write_text(json.dumps({letter: index for index, letter in enumerate(letters)}))
    transformers.Wav2Vec2CTCTokenizer(str(vocabulary)).save_pretrained(directory)
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=SAMPLING_RATE).save_pretrained(directory)


WHISPER_LANGUAGES = ("en", "de", "fr", "zh")
_TIMES = [f"<|{step * 0.02:.2f}|>" for step in range(1501)]


def whisper_tokenizer() -> transformers.WhisperTokenizer:
    """Return a tokenizer with one token per byte, the special tokens of Whisper and its times."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["<|endoftext|>"] = len(vocabulary)
    tokenizer = transformers.WhisperTokenizer(vocabulary, [])
    special = ["<|startoftranscript|>", *(f"<|{code}|>" for code in WHISPER_LANGUAGES), "<|translate|>"]
    special += ["<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in _TIMES])
    return tokenizer


def whisper(directory: Path, english_only: bool = False, **generation: Any) -> None:
    """Save a Whisper of 30 s windows, whose generation_config.json has `generation` beside what Whisper needs."""
    tokenizer = whisper_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in (*WHISPER_LANGUAGES, "endoftext")}
    tasks = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("transcribe", "translate")}
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    common = {
        "decoder_start_token_id": start,
        "eos_token_id": ids["endoftext"],
        "bos_token_id": ids["endoftext"],
        "pad_token_id": ids["endoftext"],
    }
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=1,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_target_positions=32,
        begin_suppress_tokens=None,
        **common,
    )
    # Printable text: any other byte would be a replacement character.
    readable = {*tokenizer.encode("abcdefghijklmnopqrstuvwxyz ", add_special_tokens=False), ids["endoftext"]}
    first_time = tokenizer.convert_tokens_to_ids("<|0.00|>")
    unreadable = [token for token in range(first_time) if token not in readable]
    _save("WhisperForConditionalGeneration", config, directory, sorted(readable))
    several = {
        "lang_to_id": {f"<|{code}|>": ids[code] for code in WHISPER_LANGUAGES},
        "task_to_id": tasks,
    }
    transformers.GenerationConfig(
        **common,
        max_length=32,
        no_timestamps_token_id=tokenizer.convert_tokens_to_ids("<|notimestamps|>"),
        prev_sot_token_id=tokenizer.convert_tokens_to_ids("<|startofprev|>"),
        is_multilingual=not english_only,
        begin_suppress_tokens=[ids["endoftext"]],
        **{
            "suppress_tokens": unreadable,
            "no_repeat_ngram_size": 2,
            "alignment_heads": [[0, 0], [1, 1]],
            **generation,
        },
        **({} if english_only else several),
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    transformers.WhisperFeatureExtractor().save_pretrained(directory)


def _causal(directory: Path) -> None:
    saved_model(tiny_model("llama"), directory)


MODELS: dict[str, Callable[[Path], None]] = {
    "fill-mask": _bert("BertForMaskedLM"),
    "text-classification": _bert("BertForSequenceClassification", **_labels("good", "bad", "other")),
    "token-classification": _bert("BertForTokenClassification", **_labels("O", "B-PER", "I-PER")),
    "question-answering": _bert("BertForQuestionAnswering"),
    "zero-shot-classification": _bert(
        "BertForSequenceClassification", **_labels("contradiction", "neutral", "entailment")
    ),
    "feature-extraction": _bert("BertModel"),
    "text-embedding": sentence_transformer,
    "table-question-answering": _tapas,
    "text2text-generation": _t5,
    "summarization": _t5,
    "translation_en_to_de": _t5,
    "text-generation": _causal,
    "image-classification": _vit,
    "automatic-speech-recognition": _wav2vec2,
}


def make_task_model(task: str, directory: Path, **options: Any) -> Path:
    """Make a model directory for `task`; `options` are keys without "option.", but for batch_size and its like."""
    directory.mkdir(parents=True, exist_ok=True)
    MODELS[task](directory)
    return write_properties(directory, **{"task": task, "rolling_batch": "disable", **options})
