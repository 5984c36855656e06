//! The configurations that the repository hands out are accepted by the binary it builds, so that they cannot fall
//! behind it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tempfile::TempDir;

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(file)
}

fn check(file: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mcp-sidecar")).arg("check").arg(file).output().expect("the binary runs")
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn the_complete_configuration_is_accepted() {
    let output = check(&deploy("sidecar.toml"));
    assert_eq!(output.status.code(), Some(0), "{}", told(&output));
}

#[test]
fn the_configuration_in_the_kubernetes_example_is_accepted() {
    let folder = TempDir::new().unwrap();
    let token = folder.path().join("github-token");
    fs::write(&token, "a-token").unwrap();
    let example = fs::read_to_string(deploy("kubernetes.yaml")).unwrap();
    let block = example.lines().skip_while(|l| !l.contains("sidecar.toml: |")).skip(1);
    let block: String = block.take_while(|l| *l != "---").map(|l| format!("{}\n", l.trim_start())).collect();
    assert!(block.contains("[upstreams."), "{block}");
    let file = folder.path().join("sidecar.toml");
    // A path of the container; here it is wherever the test put it.
    fs::write(&file, block.replace("/run/secrets/mcp-sidecar/github-token", &token.display().to_string()))
        .unwrap();
    let output = check(&file);
    assert_eq!(output.status.code(), Some(0), "{}", told(&output));
}
