//! Progress bars on standard error, on a terminal only.

#![forbid(unsafe_code)]

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of `total` steps called `what`; `unit` names the steps. Invisible unless standard error is a terminal.
pub(crate) fn bar(what: &'static str, total: u64, unit: &str) -> ProgressBar {
    styled(what, total, &format!("{{prefix}} {{bar:32}} {{pos}}/{{len}} {unit}, {{eta}} left"))
}

/// As [`bar`], counting bytes.
pub(crate) fn byte_bar(what: &'static str, total: u64) -> ProgressBar {
    styled(what, total, "{prefix} {bar:32} {decimal_bytes}/{decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left")
}

fn styled(what: &'static str, total: u64, template: &str) -> ProgressBar {
    // indicatif draws nothing when standard error is no terminal
    let style = ProgressStyle::with_template(template).expect("the templates of this file are well-formed");
    ProgressBar::new(total).with_style(style.progress_chars("=> ")).with_prefix(what)
}
