"""The public names of the package `engine`. Importing them imports neither torch, transformers nor
asyncio; programs for asyncio import `engine.aio`."""

from engine.api import handles as handles
from engine.api._generated import blocking as blocking
from engine.api.engine import Engine as Engine
from engine.api.engine import Stream as Stream
from engine.api.engine import open_engine as open_engine
from engine.config import EngineConfig as EngineConfig
from engine.config import ModelConfig as ModelConfig
from engine.core.common.events import Finished as Finished
from engine.core.common.prompts import PromptProgress as PromptProgress
from engine.core.common.types import EndReason as EndReason
from engine.core.text.types import Constraint as Constraint
from engine.core.text.types import Tokens as Tokens
from engine.errors import TrioletError as TrioletError
from engine.requests.encode.classify_values import Classification as Classification
from engine.requests.encode.classify_values import ClassifyRequest as ClassifyRequest
from engine.requests.encode.classify_values import Entity as Entity
from engine.requests.encode.classify_values import LabelScore as LabelScore
from engine.requests.encode.values import Embedding as Embedding
from engine.requests.encode.values import EmbedRequest as EmbedRequest
from engine.requests.encode.values import RerankRequest as RerankRequest
from engine.requests.encode.values import Score as Score
from engine.requests.image_generation.values import DrawingFinished as DrawingFinished
from engine.requests.image_generation.values import DrawingStarted as DrawingStarted
from engine.requests.image_generation.values import DrawRequest as DrawRequest
from engine.requests.image_generation.values import GeneratedImage as GeneratedImage
from engine.requests.image_generation.values import Progress as Progress
from engine.requests.text.chat_values import Chat as Chat
from engine.requests.text.continuation import Continuation as Continuation
from engine.requests.text.continuation import ContinuedChoice as ContinuedChoice
from engine.requests.text.values import AnswerTokens as AnswerTokens
from engine.requests.text.values import GenerateRequest as GenerateRequest
from engine.requests.text.values import OutputOptions as OutputOptions
from engine.requests.text.values import PromptOptions as PromptOptions
from engine.requests.text.values import ReasoningOptions as ReasoningOptions
from engine.requests.text.values import SamplingParams as SamplingParams
from engine.requests.text.values import Started as Started
from engine.requests.text.values import ToolCallDelta as ToolCallDelta

# mypy takes the names from the imports, and does not understand such a list.
globals()["__all__"] = [name for name in dir() if not name.startswith("_")]
