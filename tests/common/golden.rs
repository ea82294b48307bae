//! Reads golden vectors: the committed ones in tests/goldens, the development family of a shared folder when there is
//! one, and the checkpoints both belong to.
#![forbid(unsafe_code)]

use super::checkpoint::{self, Recipe};
use super::shared::shared;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// One model's folder of golden vectors.
pub struct Golden {
    pub name: String,
    pub home: PathBuf,
    pub manifest: Value,
}

/// The nano models committed with this repository.
pub fn nano() -> Vec<Golden> {
    let all = ["nano-flash", "nano-pro", "nano-dspark", "nano-base"].map(|name| Golden::open(&committed().join(name)));
    all.into_iter().filter(Golden::runs_here).collect()
}

/// A small random model for tests that need no golden.
pub fn small() -> PathBuf {
    Golden::open(&committed().join("nano-flash")).runnable()
}

/// The folder of the committed goldens.
pub fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens")
}

/// A model of the development family; `None`, said aloud, where the shared folder is absent.
pub fn dev(name: &str) -> Option<Golden> {
    shared(&format!("golden {name}"), &format!("goldens/dev/{name}")).map(|home| Golden::open(&home))
}

impl Golden {
    pub fn open(home: &Path) -> Self {
        let name = home.file_name().expect("a model folder").to_string_lossy().into_owned();
        Self { name, home: home.into(), manifest: json(&home.join("manifest.json")) }
    }

    /// The model's checkpoint folder: `DSV4_GOLDEN_CHECKPOINTS/NAME` if there, else made here from the recipe.
    pub fn checkpoint(&self) -> PathBuf {
        let given = std::env::var_os("DSV4_GOLDEN_CHECKPOINTS").map(|root| PathBuf::from(root).join(&self.name));
        if let Some(given) = given.filter(|folder| folder.is_dir()) {
            return given;
        }
        let sha256 = self.manifest["sha256"].as_object().expect("sha256 of the checkpoint's files");
        let sha256: BTreeMap<String, String> =
            sha256.iter().map(|(file, hex)| (file.clone(), hex.as_str().expect("hex").to_owned())).collect();
        assert!(sha256.keys().any(|file| file.starts_with("model-")), "{}: no shard has a sha256", self.name);
        checkpoint::cached(&self.name, &self.recipe(), &sha256)
    }

    /// Whether the device under test runs it: GPU kernels know the releases' head size alone.
    fn runs_here(&self) -> bool {
        let runs = super::subject::device().is_none() || self.manifest["overrides"]["head_dim"].is_null();
        if !runs {
            super::shared::say(&format!("SKIPPED golden {}: its head size does not run on the device", self.name));
        }
        runs
    }

    /// The checkpoint; on a GPU, whose kernels know the releases' head size alone, one like it with that.
    pub fn runnable(&self) -> PathBuf {
        if self.runs_here() {
            return self.checkpoint();
        }
        let mut recipe = self.recipe();
        recipe.set.insert("head_dim".into(), 512.into());
        checkpoint::cached(&format!("{}-512", self.name), &recipe, &BTreeMap::new())
    }

    pub fn recipe(&self) -> Recipe {
        Recipe {
            preset: self.manifest["preset"].as_str().expect("a preset").into(),
            seed: self.seed(),
            set: self.manifest["overrides"].as_object().expect("overrides").clone(),
        }
    }

    pub fn seed(&self) -> u64 {
        self.manifest["seed"].as_u64().expect("a seed")
    }

    /// Token ids of sequence "A" or "B".
    pub fn tokens(&self, sequence: &str) -> Vec<u32> {
        let tokens = json(&self.home.join("tokens.json"));
        let ids = tokens["sequences"][sequence].as_array().expect("a list of ids");
        ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    }

    pub fn has_sequence(&self, sequence: &str) -> bool {
        json(&self.home.join("tokens.json"))["sequences"].get(sequence).is_some()
    }

    /// The prompt lengths of sequence "A" with stored logits.
    pub fn lengths(&self) -> Vec<usize> {
        let tokens = json(&self.home.join("tokens.json"));
        tokens["lengths"].as_array().expect("lengths").iter().map(|n| n.as_u64().expect("a length") as usize).collect()
    }

    pub fn tensors(&self, file: &str) -> Tensors {
        Tensors::read(&self.home.join(file))
    }

    /// One figure of a manifest block such as "half layers on golden input: fp32 reference".
    pub fn figure(&self, block: &str, layer: usize, tensor: &str, quantile: &str) -> f64 {
        let value = &self.manifest["tolerance"][block][format!("layer {layer}")][tensor][quantile];
        value.as_f64().unwrap_or_else(|| panic!("{}: no {quantile} of {tensor} in layer {layer}", self.name))
    }
}

/// A JSON file.
pub fn json(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// One safetensors file in memory.
pub struct Tensors {
    bytes: Vec<u8>,
}

impl Tensors {
    pub fn read(path: &Path) -> Self {
        Self { bytes: fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())) }
    }

    fn parse(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("a safetensors file")
    }

    pub fn has(&self, name: &str) -> bool {
        self.parse().tensor(name).is_ok()
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.parse().tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).shape().to_vec()
    }

    /// A bf16 or float32 tensor, widened.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let file = self.parse();
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let data = tensor.data();
        match tensor.dtype() {
            Dtype::F32 => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => {
                data.as_chunks().0.iter().map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)).collect()
            }
            other => panic!("{name}: {other:?} is not a float"),
        }
    }

    /// An integer tensor.
    pub fn ints(&self, name: &str) -> Vec<i64> {
        let file = self.parse();
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let data = tensor.data();
        match tensor.dtype() {
            Dtype::I16 => data.as_chunks().0.iter().map(|b| i64::from(i16::from_le_bytes(*b))).collect(),
            Dtype::I32 => data.as_chunks().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
            other => panic!("{name}: {other:?} is not an integer"),
        }
    }

    /// Row numbers such as `rows` and `A.full_rows`.
    pub fn rows(&self, name: &str) -> Vec<usize> {
        self.ints(name).into_iter().map(|row| usize::try_from(row).expect("a row number")).collect()
    }

    /// A float tensor cut into its first-axis rows.
    pub fn float_rows(&self, name: &str) -> Vec<Vec<f32>> {
        let rows = self.shape(name)[0];
        let all = self.floats(name);
        all.chunks((all.len() / rows).max(1)).map(<[f32]>::to_vec).collect()
    }

    /// An integer tensor cut into its first-axis rows.
    pub fn int_rows(&self, name: &str) -> Vec<Vec<i64>> {
        let rows = self.shape(name)[0];
        let all = self.ints(name);
        all.chunks((all.len() / rows).max(1)).map(<[i64]>::to_vec).collect()
    }
}
