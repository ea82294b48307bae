//! Tools in the prompt: the block that offers them, and calls made earlier (reference `encoding_dsv4.py`).

use super::json::{Json, fail};
use super::message::ToolCall;
use super::prompt::Prompt;
use crate::error::Result;

const BEFORE_SCHEMAS: &str = r#"## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"#;

const AFTER_SCHEMAS: &str = "

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
";

/// Writes the block that offers `tools`, each the JSON of one function.
pub(super) fn offer(prompt: &mut Prompt, tools: &[String]) {
    prompt.template(BEFORE_SCHEMAS);
    prompt.text(&tools.join("\n"));
    prompt.text(AFTER_SCHEMAS);
}

/// Writes calls that an assistant message made. `place` names the message in errors.
pub(super) fn calls(prompt: &mut Prompt, calls: &[ToolCall], place: &str) -> Result<()> {
    prompt.template("\n\n<｜DSML｜tool_calls>\n");
    for (index, call) in calls.iter().enumerate() {
        let parameters = parameters(call, &format!("{place}.tool_calls[{index}]"))?;
        prompt.text(if index == 0 { "" } else { "\n" });
        prompt.template("<｜DSML｜invoke name=\"");
        prompt.text(&call.name);
        prompt.text("\">\n");
        for (index, (name, value)) in parameters.iter().enumerate() {
            prompt.text(if index == 0 { "" } else { "\n" });
            parameter(prompt, name, value);
        }
        prompt.template("\n</｜DSML｜invoke>");
    }
    prompt.template("\n</｜DSML｜tool_calls>");
    Ok(())
}

fn parameter(prompt: &mut Prompt, name: &str, value: &Json) {
    prompt.template("<｜DSML｜parameter name=\"");
    prompt.text(name);
    match value {
        Json::String(text) => {
            prompt.text("\" string=\"true\">");
            prompt.text(text);
        }
        other => {
            prompt.text("\" string=\"false\">");
            prompt.text(&other.dump());
        }
    }
    prompt.template("</｜DSML｜parameter>");
}

/// The call's parameters. Text that is not JSON is one parameter `arguments`, as the official
/// encoder writes it; JSON that is not an object has no parameters to name and is refused.
fn parameters(call: &ToolCall, place: &str) -> Result<Vec<(String, Json)>> {
    match Json::parse(&call.arguments) {
        Ok(Json::Object(members)) => Ok(members),
        Ok(other) => {
            let found = other.kind();
            fail(place, format_args!("arguments: expected a JSON object, found {found}"))
        }
        Err(_) => Ok(vec![("arguments".to_owned(), Json::String(call.arguments.clone()))]),
    }
}
