//! `dsv4 chat`: a conversation, line by line.

mod history;

use std::io::{BufRead, IsTerminal, Read};
use std::path::PathBuf;

use dsv4::chat::{
    ChatOptions, EffortRules, Event, Message, Parser, ReasoningEffort, Reply, Role, ThinkingMode, render,
};
use dsv4::model::config::Draft;
use dsv4::{Engine, Error, ErrorKind, Finish, GenerateOptions, Sampler, Session, file};

use crate::args::{CallArgs, ContextArgs, EngineArgs, MetricsArgs, SamplingArgs, SessionArgs};
use crate::failure::{Failure, Result, one_line};
use crate::interrupt::Interrupt;
use crate::number::whole;
use crate::output;
use crate::run::feed;

const EXAMPLES: &str = "\
Each line of standard input is a message; the answer streams to standard output.
Reasoning is dimmed on a terminal and stands between <think> and </think>
elsewhere. Calls of tools are shown as [call name {arguments}] and not carried
out. Ctrl-C ends an answer. Lines with a meaning:
  /reset    forget the conversation
  /quit     end (so does the end of the input)
  //text    a message that begins with a slash

Examples:
  dsv4 chat ~/models/DeepSeek-V4-Flash --thinking --effort max
  dsv4 chat MODEL --session talk.session
  printf 'I am Ann.\\nWho am I?\\n' | dsv4 chat MODEL --system 'Be brief.' --greedy";

/// Talk with a model
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint folder
    model: PathBuf,

    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Let the model reason before it answers
    #[arg(long)]
    thinking: bool,

    /// How much to reason: low (0731 and later), high or max [default: the checkpoint's]
    #[arg(long, value_name = "LEVEL", requires = "thinking")]
    effort: Option<ReasoningEffort>,

    /// JSON file with OpenAI tools to offer
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,

    /// Most tokens of an answer; 0 is no limit but the context
    #[arg(short = 'n', long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    max_tokens: u64,

    /// Report the tokens of each turn
    #[arg(long)]
    stats: bool,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    context: ContextArgs,

    #[command(flatten)]
    session: SessionArgs,

    #[command(flatten)]
    calls: CallArgs,

    #[command(flatten)]
    metrics: MetricsArgs,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) fn run(args: Args) -> Result {
    args.session.check()?;
    let sampling = args.sampling.options(&args.model)?;
    let metrics = args.metrics.check(&args.model)?;
    let tools = args.tools.as_deref().map(output::read_text).transpose()?;
    let engine = args.engine.open(&args.model)?;
    let options = ChatOptions {
        thinking: if args.thinking { ThinkingMode::Thinking } else { ThinkingMode::Chat },
        effort: args.effort,
        effort_rules: EffortRules::for_config(matches!(engine.model().config().draft, Draft::Dspark { .. })),
        tools,
        ..ChatOptions::default()
    };
    let mut chat = Chat {
        system: args.system.map(|text| Message::new(Role::System, text)),
        messages: Vec::new(),
        options,
        session: args.session.open(&engine, &args.context)?,
        sampler: Sampler::new(sampling)?,
        max_tokens: Some(args.max_tokens).filter(|&n| n > 0),
        stats: args.stats,
        tools: args.tools,
    };
    args.calls.apply(&mut chat.session);
    chat.check(&engine)?;
    chat.resume(&args.session)?;
    let talked = chat.talk();
    if args.session.is_given() {
        chat.complete()?;
        args.session.save(&chat.session)?;
    }
    MetricsArgs::write(metrics.as_ref(), &engine)?;
    talked
}

struct Chat {
    system: Option<Message>,
    messages: Vec<Message>,
    options: ChatOptions,
    session: Session,
    sampler: Sampler,
    max_tokens: Option<u64>,
    stats: bool,
    /// File of the tools, for messages.
    tools: Option<PathBuf>,
}

/// An answer as it comes in.
struct Answer {
    reply: Reply,
    /// Reasoning was printed and has not ended.
    in_reasoning: bool,
    finish: Option<Finish>,
    tokens: u64,
}

impl Chat {
    /// Refuses options that no conversation could be rendered with, before the first line is read.
    fn check(&self, engine: &Engine) -> Result {
        let probe = [Message::new(Role::User, "")];
        let prompt = render(&probe, &self.options).map_err(|e| match &self.tools {
            Some(file) if e.kind() == ErrorKind::Chat => e.context(file.display()),
            _ => e,
        })?;
        prompt.encode(engine.model().tokenizer()?)?;
        Ok(())
    }

    /// Goes on with the conversation that the session holds, or begins one.
    fn resume(&mut self, file: &SessionArgs) -> Result {
        if self.session.position() == 0 {
            return self.reset();
        }
        let engine = self.session.engine().clone();
        let tokenizer = engine.model().tokenizer()?;
        let turns = history::read(self.session.tokens(), self.system.as_ref(), &self.options, tokenizer);
        let turns = turns.map_err(|e| file.blame(e))?;
        output::note(format_args!("(going on: {} messages, {} tokens)", turns.len(), self.session.position()));
        self.messages = self.system.iter().cloned().chain(turns).collect();
        Ok(())
    }

    /// Brings the session to the conversation's end: what is of no turn goes, and what the last answer lacks is fed, as
    /// far as it fits.
    fn complete(&mut self) -> Result {
        // a message that an error left without an answer
        self.messages.pop_if(|last| last.role == Role::User);
        if self.messages.len() == self.system.iter().len() {
            return self.reset();
        }
        let engine = self.session.engine().clone();
        let options = ChatOptions { add_generation_prompt: false, ..self.options.clone() };
        let tokens = render(&self.messages, &options)?.encode(engine.model().tokenizer()?)?;
        let known = self.session.keep_common(&tokens)?;
        let end = tokens.len().min(self.session.context());
        Ok(self.session.feed(&tokens[known..end])?)
    }

    fn reset(&mut self) -> Result {
        self.messages = self.system.iter().cloned().collect();
        Ok(self.session.clear()?)
    }

    /// Reads lines until the end of the input.
    fn talk(&mut self) -> Result {
        let is_terminal = std::io::stdin().is_terminal() && output::is_terminal();
        let mut line = Vec::new();
        loop {
            if is_terminal {
                output::piece("> ")?;
            }
            line.clear();
            // one byte more than accepted, so that a line too long is told from one that just fits
            let read = std::io::stdin().lock().take(file::TEXT.limit + 1).read_until(b'\n', &mut line);
            if read.map_err(|e| Error::new(ErrorKind::Io, format!("standard input: {e}")))? == 0 {
                return Ok(());
            }
            if line.len() as u64 > file::TEXT.limit {
                let message = format!("standard input: a line of more than {} bytes", file::TEXT.limit);
                return Err(Error::new(ErrorKind::InvalidArgument, message).into());
            }
            let text = std::str::from_utf8(&line)
                .map_err(|e| Error::new(ErrorKind::InvalidArgument, format!("standard input: not UTF-8: {e}")))?;
            match text.trim() {
                "" => {}
                "/quit" => return Ok(()),
                "/reset" => self.reset()?,
                command if command.starts_with('/') && !command.starts_with("//") => {
                    output::note(format_args!("{}: not known; /reset, /quit, or //text", one_line(command)));
                }
                message => {
                    let message = message.strip_prefix('/').unwrap_or(message).to_owned();
                    self.turn(message)?;
                }
            }
        }
    }

    /// One message and its answer.
    fn turn(&mut self, text: String) -> Result {
        self.messages.push(Message::new(Role::User, text));
        let engine = self.session.engine().clone();
        let prompt = render(&self.messages, &self.options)?.encode(engine.model().tokenizer()?)?;
        if prompt.len() > self.session.context() {
            self.messages.pop();
            output::note(format_args!(
                "the conversation would have {} tokens, the context holds {}: send less, or /reset",
                prompt.len(),
                self.session.context()
            ));
            return Ok(());
        }
        let interrupt = Interrupt::arm();
        let known = self.session.keep_common(&prompt)?;
        match feed(&mut self.session, &prompt[known..], &interrupt) {
            Err(Failure::Interrupted) => {
                self.messages.pop();
                return Ok(());
            }
            other => other?,
        }
        let answer = self.answer(&interrupt)?;
        output::piece("\n")?;
        match answer.finish {
            None => output::note("(interrupted)"),
            Some(Finish::ContextFull) => {
                output::note(format_args!("(the context of {} tokens is full: /reset)", self.session.context()));
            }
            Some(Finish::MaxTokens) => output::note("(cut by --max-tokens)"),
            Some(Finish::Eos | Finish::Token(_) | Finish::String(_)) => {}
        }
        if self.stats {
            let (new, tokens, position) = (prompt.len() - known, answer.tokens, self.session.position());
            output::note(format_args!(
                "({known} tokens known, {new} fed, {tokens} generated, {position} in the session)"
            ));
        }
        self.messages.push(answer.reply.to_message());
        Ok(())
    }

    /// Generates and prints an answer.
    fn answer(&mut self, interrupt: &Interrupt) -> Result<Answer> {
        let options = GenerateOptions { max_tokens: self.max_tokens, ..GenerateOptions::default() };
        let engine = self.session.engine().clone();
        let tokenizer = engine.model().tokenizer()?;
        let mut parser = Parser::new(self.options.thinking);
        let mut answer = Answer { reply: Reply::default(), in_reasoning: false, finish: None, tokens: 0 };
        let mut generation = self.session.generate(&mut self.sampler, options)?;
        for piece in &mut generation {
            for event in parser.push_token(tokenizer, piece?.token)? {
                answer.take(&event)?;
            }
            if interrupt.seen() {
                break;
            }
        }
        answer.finish = generation.finish();
        answer.tokens = generation.tokens();
        for event in parser.finish() {
            answer.take(&event)?;
        }
        answer.end_reasoning()?;
        Ok(answer)
    }
}

impl Answer {
    /// Keeps and prints the next part.
    fn take(&mut self, event: &Event) -> Result {
        self.reply.push(event);
        if let Event::ReasoningDelta(text) = event {
            let begin = if self.in_reasoning || output::is_terminal() { "" } else { "<think>" };
            self.in_reasoning = true;
            return output::piece(&if output::is_terminal() { output::dimmed(text) } else { format!("{begin}{text}") });
        }
        self.end_reasoning()?;
        match event {
            Event::ContentDelta(text) => output::piece(text),
            Event::ToolCallBegin { name, .. } => output::piece(&format!("\n[call {name} ")),
            Event::ToolCallArgumentDelta { json, .. } => output::piece(json),
            Event::ToolCallEnd { .. } => output::piece("]"),
            Event::Malformed { raw, .. } => output::piece(raw),
            Event::ReasoningDelta(_) | Event::End(_) => Ok(()),
        }
    }

    /// Marks the end of printed reasoning.
    fn end_reasoning(&mut self) -> Result {
        if !std::mem::take(&mut self.in_reasoning) {
            return Ok(());
        }
        output::piece(if output::is_terminal() { "\n\n" } else { "</think>" })
    }
}
