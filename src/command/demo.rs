//! `mcp-sidecar demo`: the main job, seen. Starts the demo upstream, a sidecar before it and a client, all in
//! this process on free ports, plays the `scenes`, and shows for each what the client saw and what the access
//! log says about it.
//!
//! It is a check too: every scene compares what came out with what is promised, and one that differs makes the
//! exit code 1.

pub(crate) mod client;
mod scenes;
mod sidecar;
mod stage;

use std::{
    io::{self, Write},
    net::Ipv4Addr,
    process::ExitCode,
    time::Duration,
};

use crate::demo::Server;

use scenes::{SCENES, Scene};
use sidecar::Sidecar;
use stage::{Seen, Stage};

/// The longest that one scene may take; each is over in a few seconds.
const SCENE_WITHIN: Duration = Duration::from_secs(15);

/// Starts everything, plays every scene and prints it. 0 if all came out as promised, else 1.
pub async fn run() -> ExitCode {
    let out = &mut io::stdout();
    let played = match set_up().await {
        Ok(mut stage) => perform(&mut stage, SCENES, out).await,
        Err(error) => writeln!(out, "the demo cannot run: {error}").map(|()| false),
    };
    // Where the output takes nothing, nobody can be told why.
    if played.unwrap_or(false) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn set_up() -> Result<Stage, String> {
    let started = Server::start((Ipv4Addr::LOCALHOST, 0).into()).await;
    let (upstream, server) = started.map_err(|error| format!("no demo upstream: {error}"))?;
    let sidecar = Sidecar::start(upstream).await?;
    Ok(Stage::new(sidecar, server))
}

/// Plays the scenes in their order; gives whether all came out right.
async fn perform(stage: &mut Stage, scenes: &[Scene], out: &mut impl Write) -> io::Result<bool> {
    writeln!(out, "a sidecar at http://{}{}, a demo upstream behind it", stage.address(), sidecar::PATH)?;
    let mut failed = Vec::new();
    for (number, scene) in (1..).zip(scenes) {
        let seen = play(scene, stage, SCENE_WITHIN).await;
        show(out, number, scene, &seen)?;
        if !seen.wrong.is_empty() {
            failed.push(number.to_string());
        }
    }
    let all = scenes.len();
    match failed.as_slice() {
        [] => writeln!(out, "\nall {all} scenes came out as promised")?,
        failed => writeln!(
            out,
            "\n{} of {all} scenes differ from what is promised: {}",
            failed.len(),
            failed.join(", ")
        )?,
    }
    Ok(failed.is_empty())
}

/// Plays one scene; what breaks it off is one more thing that is wrong.
async fn play(scene: &Scene, stage: &mut Stage, within: Duration) -> Seen {
    let mut seen = Seen::default();
    match tokio::time::timeout(within, (scene.play)(stage, &mut seen)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => seen.wrong.push(error.to_string()),
        Err(_) => seen.wrong.push(format!("not over within {within:?}")),
    }
    seen
}

fn show(out: &mut impl Write, number: usize, scene: &Scene, seen: &Seen) -> io::Result<()> {
    writeln!(out, "\n{number}. {}", scene.title)?;
    for line in &seen.said {
        writeln!(out, "   {line}")?;
    }
    for record in &seen.records {
        writeln!(out, "   log {record}")?;
    }
    for wrong in &seen.wrong {
        writeln!(out, "   WRONG: {wrong}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
