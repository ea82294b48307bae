//! chat
#[derive(clap::Args)]
pub(crate) struct Args {}
pub(crate) fn run(_: Args) -> crate::failure::Result {
    Ok(())
}
