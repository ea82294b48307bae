//! Loads a model and chats: keeps the conversation and streams each answer.
//!
//! ```text
//! cargo run --release --example chat -- MODEL "What is the capital of France?"    one question
//! cargo run --release --example chat -- MODEL                                     a line of standard input each
//! ```

use std::error::Error;
use std::io::{Write, stderr, stdin, stdout};
use std::sync::Arc;

use dsv4::chat::{ChatOptions, Event, Message, Parser, Reply, Role, ThinkingMode, render};
use dsv4::{Engine, EngineOptions, GenerateOptions, Model, Sampler, SamplerOptions, Session, SessionOptions};

struct Conversation {
    model: Arc<Model>,
    session: Session,
    sampler: Sampler,
    messages: Vec<Message>,
}

impl Conversation {
    fn open(path: &str) -> dsv4::Result<Self> {
        let model = Model::open(path)?;
        let engine = Engine::new(&model, EngineOptions::default())?;
        let session = Session::new(&engine, SessionOptions::default())?;
        let sampler = Sampler::new(SamplerOptions::default())?;
        Ok(Self { model, session, sampler, messages: Vec::new() })
    }

    fn ask(&mut self, question: &str) -> Result<(), Box<dyn Error>> {
        self.messages.push(Message::new(Role::User, question));
        let tokenizer = self.model.tokenizer()?;
        let prompt = render(&self.messages, &ChatOptions::default())?.encode(tokenizer)?;
        // what the session has of the conversation is not computed again
        let kept = self.session.keep_common(&prompt)?;
        self.session.feed(&prompt[kept..])?;
        let mut parser = Parser::new(ThinkingMode::Chat);
        let mut reply = Reply::default();
        let mut show = |events: Vec<Event>| -> std::io::Result<()> {
            for event in events {
                if let Event::ContentDelta(text) = &event {
                    write!(stdout(), "{text}")?;
                }
                reply.push(&event);
            }
            stdout().flush()
        };
        let options = GenerateOptions { max_tokens: Some(200), ..Default::default() };
        for piece in self.session.generate(&mut self.sampler, options)? {
            show(parser.push_token(tokenizer, piece?.token)?)?;
        }
        show(parser.finish())?;
        writeln!(stdout())?;
        self.messages.push(reply.to_message());
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let Some(model) = arguments.get(1) else { return Err("usage: chat MODEL [QUESTION]".into()) };
    let mut conversation = Conversation::open(model)?;
    if let Some(question) = arguments.get(2) {
        return conversation.ask(question);
    }
    write!(stderr(), "> ")?;
    for line in stdin().lines() {
        conversation.ask(&line?)?;
        write!(stderr(), "> ")?;
    }
    Ok(())
}
