//! Spellings of the control tokens and tags of V4's chat format (reference `encoding_dsv4.py`).

pub(super) const BOS: &str = "<｜begin▁of▁sentence｜>";
pub(super) const EOS: &str = "<｜end▁of▁sentence｜>";
pub(super) const USER: &str = "<｜User｜>";
pub(super) const ASSISTANT: &str = "<｜Assistant｜>";
pub(super) const THINK: &str = "<think>";
pub(super) const END_THINK: &str = "</think>";
pub(super) const DSML: &str = "｜DSML｜";
pub(super) const LATEST_REMINDER: &str = "<｜latest_reminder｜>";

/// Control tokens that occur inside the fixed texts of the format.
pub(super) const IN_TEMPLATES: [&str; 3] = [THINK, END_THINK, DSML];
