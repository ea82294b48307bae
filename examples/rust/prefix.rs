//! Asks several questions about one text at the same time. The text goes through the model once; each question has a
//! session that shares its cache, and the engine takes them through the model together.
//!
//! ```text
//! cargo run --release --example prefix -- MODEL TEXTFILE QUESTION...
//! ```

use std::error::Error;
use std::io::{Write, stdout};
use std::{fs, thread};

use dsv4::{Engine, EngineOptions, GenerateOptions, Markup, Model, Sampler, SamplerOptions, Session, SessionOptions};

fn answer(model: &Model, mut session: Session, question: &str, seed: u64) -> dsv4::Result<String> {
    session.feed(&model.tokenizer()?.encode(question, Markup::Text)?)?;
    let mut sampler = Sampler::new(SamplerOptions { seed, ..Default::default() })?;
    let options = GenerateOptions { max_tokens: Some(40), ..Default::default() };
    session.generate(&mut sampler, options)?.map(|piece| Ok(piece?.text)).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, file, questions @ ..] = &arguments[..] else {
        return Err("usage: prefix MODEL TEXTFILE QUESTION...".into());
    };
    let model = Model::open(path)?;
    let engine = Engine::new(&model, EngineOptions::default())?;
    let mut base = Session::new(&engine, SessionOptions::default())?;
    base.feed(&[model.config().bos_token_id])?;
    base.feed(&model.tokenizer()?.encode(&fs::read_to_string(file)?, Markup::Text)?)?;

    let answers = thread::scope(|scope| -> dsv4::Result<Vec<String>> {
        let mut running = Vec::new();
        for (question, seed) in questions.iter().zip(0..) {
            let (session, model) = (base.fork()?, &model);
            running.push(scope.spawn(move || answer(model, session, question, seed)));
        }
        running.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    })?;
    for (question, answer) in questions.iter().zip(answers) {
        writeln!(stdout(), "{question} ->{answer}\n")?;
    }
    Ok(())
}
