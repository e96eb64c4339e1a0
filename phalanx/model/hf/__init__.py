"""Hugging Face folders in and out: config.json, and safetensors one tensor at a time."""

from phalanx.model.hf.config import config_from_hf, config_to_hf
from phalanx.model.hf.exchange import export_hf, load_hf
from phalanx.model.hf.files import INDEX_FILE, HfError

__all__ = ["INDEX_FILE", "HfError", "config_from_hf", "config_to_hf", "export_hf", "load_hf"]
