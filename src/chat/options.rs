//! What the caller of the encoder may choose.

use std::str::FromStr;

use crate::error::{Error, Result, bail};

/// Whether the model reasons before it answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThinkingMode {
    /// Answers at once: the generation prompt ends with `</think>`.
    #[default]
    Chat,
    /// Reasons first: the generation prompt ends with `<think>`.
    Thinking,
}

/// How much the model shall reason; only in [`ThinkingMode::Thinking`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningEffort {
    /// The 0731 and 0813 checkpoints' default; the April ones do not know it.
    Low,
    /// April: the default. 0731 and 0813: the text that April's `Max` adds.
    High,
    /// Adds the strongest text that the checkpoint was trained with.
    Max,
}

impl ReasoningEffort {
    /// `low`, `high` or `max`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::High => "high",
            Self::Max => "max",
        }
    }
}

impl FromStr for ReasoningEffort {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "low" => Ok(Self::Low),
            "high" => Ok(Self::High),
            "max" => Ok(Self::Max),
            _ => bail!(InvalidArgument, "reasoning effort {name:?} is none of low, high, max"),
        }
    }
}

/// Which texts stand for which effort. They differ between releases and nothing in the prompt
/// format itself tells them apart, so the checkpoint decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EffortRules {
    /// April 2026 (one MTP block, or no drafter): high, max.
    #[default]
    April,
    /// 0731 and 0813 (three DSpark stages): low, high, max.
    Dspark0731,
}

impl EffortRules {
    /// The rules of a checkpoint, told by its drafter.
    pub fn for_config(draft_is_dspark: bool) -> Self {
        if draft_is_dspark { Self::Dspark0731 } else { Self::April }
    }

    /// Text right after BOS for `effort`; empty for the default.
    ///
    /// # Errors
    /// `InvalidArgument` when these rules do not know the effort.
    pub(super) fn prefix(self, effort: Option<ReasoningEffort>) -> Result<&'static str> {
        use ReasoningEffort::{High, Low, Max};
        match (self, effort) {
            (_, None) | (Self::April, Some(High)) | (Self::Dspark0731, Some(Low)) => Ok(""),
            (Self::April, Some(Max)) | (Self::Dspark0731, Some(High)) => Ok(ABSOLUTE_MAXIMUM),
            (Self::Dspark0731, Some(Max)) => Ok(BEYOND_MAXIMUM),
            (Self::April, Some(Low)) => {
                bail!(InvalidArgument, "reasoning effort low: April checkpoints know high and max")
            }
        }
    }
}

/// How messages become a prompt.
///
/// ```
/// use dsv4::chat::{ChatOptions, ReasoningEffort, ThinkingMode};
/// let options = ChatOptions {
///     thinking: ThinkingMode::Thinking,
///     effort: Some(ReasoningEffort::Max),
///     response_format: Some(r#"{"type": "json_object"}"#.into()),
///     ..ChatOptions::default()
/// };
/// assert!(options.add_generation_prompt);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatOptions {
    /// Whether the model reasons first.
    pub thinking: ThinkingMode,
    /// How much; `None` is the checkpoint's default. Refused in [`ThinkingMode::Chat`].
    pub effort: Option<ReasoningEffort>,
    /// Which effort texts the checkpoint was trained with.
    pub effort_rules: EffortRules,
    /// Leaves out the reasoning of answers before the last user message (and developer messages
    /// there), as the models were trained. Has no effect when any message or `tools` offers tools.
    pub drop_thinking: bool,
    /// Ends the prompt where the model's answer begins.
    pub add_generation_prompt: bool,
    /// OpenAI `tools`, a JSON array; offered in the system message.
    pub tools: Option<String>,
    /// OpenAI `response_format`, a JSON object; asked for in the system message. `{"type":"text"}`
    /// asks for nothing.
    pub response_format: Option<String>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            thinking: ThinkingMode::default(),
            effort: None,
            effort_rules: EffortRules::default(),
            drop_thinking: true,
            add_generation_prompt: true,
            tools: None,
            response_format: None,
        }
    }
}

const ABSOLUTE_MAXIMUM: &str = "\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

";

const BEYOND_MAXIMUM: &str = "\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: \
exhaustively decompose the problem into its most fundamental components, trace every causal chain \
to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and \
are certain that no assumption remains unchecked and no error remains undiscovered.

";
