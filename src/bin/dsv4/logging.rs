//! The library's log events on standard error.

#![forbid(unsafe_code)]

use std::fmt::{self, Write};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::failure::one_line;
use crate::output::note;

/// Shows warnings; with `verbose` 1 also what happens, with 2 details, with 3 everything.
pub(crate) fn start(verbose: u8) {
    let level = match verbose {
        0 => Level::WARN,
        1 => Level::INFO,
        2 => Level::DEBUG,
        _ => Level::TRACE,
    };
    tracing::subscriber::set_global_default(Log { level }).expect("the only subscriber of this program");
}

/// Writes each event as a line; knows no spans, of which the library has none.
struct Log {
    level: Level,
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= &self.level && metadata.target().starts_with("dsv4")
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Fields::default();
        event.record(&mut text);
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            _ => "debug",
        };
        note(format_args!("{level}: {}", one_line(&format!("{}{}", text.message, text.rest))));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// An event's message and its other fields.
#[derive(Default)]
struct Fields {
    message: String,
    rest: String,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // writing to a String cannot fail
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.rest, ", {name} {value:?}"),
        };
    }
}
