//! Reads a long document and asks about it. What has been read is saved as it goes, so that a program that was stopped goes
//! on where it was, and one that has read it all answers at once.
//!
//! ```text
//! cargo run --release --example document -- MODEL TEXTFILE SESSIONFILE QUESTION
//! ```

use std::error::Error;
use std::fs;
use std::io::{Write, stderr, stdout};
use std::sync::Arc;

use dsv4::{
    Engine, EngineOptions, ErrorKind, GenerateOptions, Markup, Model, Sampler, SamplerOptions, SaveOptions, Session,
    SessionOptions, TokenId,
};

/// Tokens between two saves; a kill loses at most these.
const PORTION: usize = 2048;

/// The session in the file, or a new one if there is none.
fn open_session(engine: &Arc<Engine>, path: &str) -> dsv4::Result<Session> {
    match Session::restore(engine, path, SessionOptions::default()) {
        Err(error) if error.kind() == ErrorKind::NotFound => Session::new(engine, SessionOptions::default()),
        restored => restored,
    }
}

/// Makes the session hold the document, and saves it as it goes.
fn read(session: &mut Session, document: &[TokenId], path: &str) -> Result<(), Box<dyn Error>> {
    // all of it, if it is this document's session; less, if the document was changed
    let mut done = session.keep_common(document)?;
    writeln!(stderr(), "{done} of {} tokens are in {path}", document.len())?;
    for part in document[done..].chunks(PORTION) {
        session.feed(part)?;
        done += part.len();
        session.save_with(path, SaveOptions { complete: done == document.len() })?;
        write!(stderr(), "\r{done} of {} tokens", document.len())?;
    }
    Ok(writeln!(stderr())?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, file, session_file, question] = &arguments[..] else {
        return Err("usage: document MODEL TEXTFILE SESSIONFILE QUESTION".into());
    };
    let model = Model::open(path)?;
    let engine = Engine::new(&model, EngineOptions::default())?;
    let mut session = open_session(&engine, session_file)?;
    let tokenizer = model.tokenizer()?;
    let mut document = vec![model.config().bos_token_id];
    document.extend(tokenizer.encode(&fs::read_to_string(file)?, Markup::Text)?);
    read(&mut session, &document, session_file)?;

    session.feed(&tokenizer.encode(question, Markup::Text)?)?;
    let mut sampler = Sampler::new(SamplerOptions::default())?;
    let options = GenerateOptions { max_tokens: Some(60), ..Default::default() };
    write!(stdout(), "{question}")?;
    for piece in session.generate(&mut sampler, options)? {
        write!(stdout(), "{}", piece?.text)?;
        stdout().flush()?;
    }
    Ok(writeln!(stdout())?)
}
