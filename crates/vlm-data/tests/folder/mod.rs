//! Folders of models for tests, made of the fixtures.

#![allow(dead_code, reason = "each test uses a part")]
#![allow(unreachable_pub, reason = "a module of several tests")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The folder of the workspace.
pub fn workspace() -> &'static Path {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = folders.find(|folder| folder.join("crates/vlm-data").is_dir());
    root.expect("the test runs in the workspace")
}

pub fn fixture(name: &str) -> PathBuf {
    let fixtures = workspace().join("crates/vlm-data/tests/fixtures/text");
    fixtures.join(name)
}

pub fn json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name)).expect("fixture")).expect("JSON")
}

/// A folder of the test's own, which is removed after it.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> &Self {
        fs::write(self.0.join(name), content).expect("a file");
        self
    }

    pub fn copy(&self, name: &str) -> &Self {
        self.write(name, fs::read(fixture(name)).expect("fixture"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// A checkpoint folder of a family, its template where that family has it.
pub fn family_folder(family: &str, test: &str) -> Folder {
    let folder = Folder::new(&format!("{test}_{family}"));
    let row = &json("families.json")[family];
    let template = fs::read_to_string(fixture(&format!("{family}.jinja"))).expect("template");
    let mut config = json("tokenizer_config.json");
    config["eos_token"] = row["eos_token"].clone();
    let place = row["template"].as_str().expect("a name");
    match place {
        "tokenizer_config.json" => config["chat_template"] = template.into(),
        "chat_template.json" => {
            let file = serde_json::json!({ "chat_template": template });
            folder.write(place, file.to_string());
            // Weaker than the other file, and not to be read.
            config["chat_template"] = "wrong".into();
        }
        _ => _ = folder.write(place, template),
    }
    let model = serde_json::json!({
        "model_type": row["model_type"],
        "vision_config": { "spatial_merge_size": 2 },
    });
    folder.write("config.json", model.to_string());
    folder
        .write("tokenizer_config.json", config.to_string())
        .copy("tokenizer.json");
    folder
}
