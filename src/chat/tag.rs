//! DSML tags: what stands between `<｜DSML｜` or `</｜DSML｜` and `>`.

/// Longer tags are not read: without an end, one would swallow the answer.
const MAX_LEN: usize = 4096;

/// A well-formed tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    ToolCalls,
    Invoke { name: String },
    Parameter { name: String, is_string: bool },
    EndToolCalls,
    EndInvoke,
    EndParameter,
}

/// What is known of a tag whose text so far is `body`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reading {
    Incomplete,
    Complete(Tag),
    /// Not a tag of this format; it ends here.
    Bad,
}

/// Judges a tag after each character; `body` begins after `｜DSML｜`. A line's end or a `>` outside
/// quotes ends every tag.
pub(super) fn read(is_closing: bool, body: &str) -> Reading {
    if body.ends_with('\n') || body.len() > MAX_LEN {
        return Reading::Bad;
    }
    if !body.ends_with('>') {
        return Reading::Incomplete;
    }
    let is_quoted = body.matches('"').count() % 2 == 1;
    match complete(is_closing, body) {
        Some(tag) => Reading::Complete(tag),
        None if is_quoted => Reading::Incomplete,
        None => Reading::Bad,
    }
}

fn complete(is_closing: bool, body: &str) -> Option<Tag> {
    match (is_closing, body) {
        (false, "tool_calls>") => return Some(Tag::ToolCalls),
        (true, "tool_calls>") => return Some(Tag::EndToolCalls),
        (true, "invoke>") => return Some(Tag::EndInvoke),
        (true, "parameter>") => return Some(Tag::EndParameter),
        (true, _) => return None,
        (false, _) => {}
    }
    if let Some(rest) = body.strip_prefix("invoke name=\"") {
        return Some(Tag::Invoke { name: attribute(rest.strip_suffix("\">")?)? });
    }
    let rest = body.strip_prefix("parameter name=\"")?;
    if let Some(name) = rest.strip_suffix("\" string=\"true\">") {
        return Some(Tag::Parameter { name: attribute(name)?, is_string: true });
    }
    let name = rest.strip_suffix("\" string=\"false\">")?;
    Some(Tag::Parameter { name: attribute(name)?, is_string: false })
}

/// A name inside quotes; one with a quote of its own cannot be told from the next attribute.
fn attribute(name: &str) -> Option<String> {
    (!name.is_empty() && !name.contains('"')).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_forms_are_tags() {
        let invoke = |name: &str| Reading::Complete(Tag::Invoke { name: name.into() });
        let parameter = |name: &str, is_string| Reading::Complete(Tag::Parameter { name: name.into(), is_string });
        for (body, reading) in [
            ("tool_calls>", Reading::Complete(Tag::ToolCalls)),
            ("tool_calls", Reading::Incomplete),
            ("tool_calls >", Reading::Bad),
            ("invoke name=\"f\">", invoke("f")),
            ("invoke name=\"a>", Reading::Incomplete),
            ("invoke name=\"a>b\">", invoke("a>b")),
            ("invoke name=\"\">", Reading::Bad),
            ("invoke name='f'>", Reading::Bad),
            ("invoke name=\"f\n", Reading::Bad),
            ("parameter name=\"k\" string=\"true\">", parameter("k", true)),
            ("parameter name=\"k\" string=\"false\">", parameter("k", false)),
            ("parameter name=\"k\">", Reading::Bad),
            ("parameter name=\"k\" string=\"yes\">", Reading::Bad),
            ("parameter>", Reading::Bad),
        ] {
            assert_eq!(read(false, body), reading, "{body:?}");
        }
        assert_eq!(read(true, "invoke>"), Reading::Complete(Tag::EndInvoke));
        assert_eq!(read(true, "parameter>"), Reading::Complete(Tag::EndParameter));
        assert_eq!(read(true, "tool_calls>"), Reading::Complete(Tag::EndToolCalls));
        assert_eq!(read(true, "think>"), Reading::Bad);
    }
}
