"""RunConfig: what a run depends on. pydantic, frozen, torch-free; TOML in, JSON out."""

from headrace.config.alarms import AlarmConfig, DriftConfig
from headrace.config.code import (
    CodeConfig,
    CodeExtraction,
    Credit,
    OutputComparison,
    RowFormat,
)
from headrace.config.correction import CorrectionConfig, RejectionConfig, WeightConfig
from headrace.config.data import (
    DataConfig,
    DynamicSamplingConfig,
    HuggingFaceDiskSource,
    JsonlSource,
    ParquetSource,
    ReasoningGymSource,
    SourceConfig,
)
from headrace.config.evaluation import EvaluationConfig
from headrace.config.faults import FaultConfig
from headrace.config.form import FormatConfig, LanguageConfig, LengthConfig
from headrace.config.generator import (
    EngineName,
    GeneratorConfig,
    SamplingConfig,
    SGLangConfig,
    VllmConfig,
)
from headrace.config.judge import CriterionConfig, JudgeConfig, RewardModelConfig, RubricConfig
from headrace.config.learner import LearnerConfig, OptimizerConfig
from headrace.config.load import check_config, dump_config, load_config, parse_config
from headrace.config.lora import LoraConfig
from headrace.config.model import ModelConfig
from headrace.config.monitor import CheckpointConfig, MonitorConfig
from headrace.config.objective import (
    CispoLoss,
    DppoTvLoss,
    GmpoLoss,
    GspoLoss,
    LossConfig,
    ObjectiveConfig,
    OverlongConfig,
    PpoClipLoss,
    ReinforceLoss,
    SapoLoss,
)
from headrace.config.parallel import ParallelConfig
from headrace.config.pipeline import PipelineConfig
from headrace.config.placement import PlacementConfig
from headrace.config.problems import CheckedRecipe
from headrace.config.remote import RemoteConfig
from headrace.config.run import DeviceName, RunConfig
from headrace.config.sandbox import SandboxConfig, ToolchainConfig
from headrace.config.verifier import (
    AnswerForm,
    AnswerType,
    ComponentConfig,
    ExactConfig,
    Extraction,
    FunctionConfig,
    MathConfig,
    NumericConfig,
    UnitRule,
    VerifierConfig,
)
from headrace.config.weight_sync import DeltaConfig, Transport, WeightSyncConfig

__all__ = [
    "AlarmConfig",
    "AnswerForm",
    "AnswerType",
    "CheckedRecipe",
    "CheckpointConfig",
    "CispoLoss",
    "CodeConfig",
    "CodeExtraction",
    "ComponentConfig",
    "CorrectionConfig",
    "Credit",
    "CriterionConfig",
    "DataConfig",
    "DeltaConfig",
    "DeviceName",
    "DppoTvLoss",
    "DriftConfig",
    "DynamicSamplingConfig",
    "EngineName",
    "EvaluationConfig",
    "ExactConfig",
    "Extraction",
    "FaultConfig",
    "FormatConfig",
    "FunctionConfig",
    "GeneratorConfig",
    "GmpoLoss",
    "GspoLoss",
    "HuggingFaceDiskSource",
    "JsonlSource",
    "JudgeConfig",
    "LanguageConfig",
    "LearnerConfig",
    "LengthConfig",
    "LoraConfig",
    "LossConfig",
    "MathConfig",
    "ModelConfig",
    "MonitorConfig",
    "NumericConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "OutputComparison",
    "OverlongConfig",
    "ParallelConfig",
    "ParquetSource",
    "PipelineConfig",
    "PlacementConfig",
    "PpoClipLoss",
    "ReasoningGymSource",
    "ReinforceLoss",
    "RejectionConfig",
    "RemoteConfig",
    "RewardModelConfig",
    "RowFormat",
    "RubricConfig",
    "RunConfig",
    "SGLangConfig",
    "SamplingConfig",
    "SandboxConfig",
    "SapoLoss",
    "SourceConfig",
    "ToolchainConfig",
    "Transport",
    "UnitRule",
    "VerifierConfig",
    "VllmConfig",
    "WeightConfig",
    "WeightSyncConfig",
    "check_config",
    "dump_config",
    "load_config",
    "parse_config",
]
