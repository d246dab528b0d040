//! The hub's folder on this machine, laid out as the Python tools lay it out, so that both use the same files:
//! `models--ORG--NAME/blobs/ID` holds contents, `snapshots/COMMIT/PATH` links to them, `refs/REVISION` has a commit.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use super::content::ContentId;
use super::error::{Error, Result};
use super::name::{RepoName, is_commit};
use super::select;

/// What the folder of a model begins with.
const MODELS: &str = "models--";

/// One model's part of the cache.
pub(super) struct ModelCache {
    root: PathBuf,
    folder: PathBuf,
    repo: CacheRepo,
    revision: String,
}

impl ModelCache {
    pub(super) fn new(root: &Path, name: &RepoName) -> Self {
        let repo = Repo::with_revision(name.id.clone(), RepoType::Model, name.revision.clone());
        let folder = root.join(repo.folder_name());
        let repo = Cache::new(root.to_owned()).repo(repo);
        Self { root: root.to_owned(), folder, repo, revision: name.revision.clone() }
    }

    /// Where the content of `id` is, once it is whole.
    pub(super) fn blob(&self, id: &ContentId) -> PathBuf {
        self.repo.blob_path(id.as_str())
    }

    /// Where it grows.
    pub(super) fn part(&self, id: &ContentId) -> PathBuf {
        self.repo.blob_path(&format!("{id}.incomplete"))
    }

    /// The folder of a commit.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.repo.pointer_path(commit)
    }

    /// Holds `id` against other processes, the Python tools among them, until the file is dropped. `waiting` is
    /// called when another has it.
    pub(super) fn lock(&self, id: &ContentId, waiting: impl FnOnce()) -> Result<File> {
        let name = self.folder.file_name().unwrap_or_default();
        let folder = self.root.join(".locks").join(name);
        fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, e))?;
        let path = folder.join(format!("{id}.lock"));
        let open = File::options().create(true).truncate(false).write(true).open(&path);
        let file = open.map_err(|e| Error::io(&path, e))?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(fs::TryLockError::WouldBlock) => {
                waiting();
                file.lock().map_err(|e| Error::io(&path, e))?;
                Ok(file)
            }
            // Some network folders know no locks. The content is checked in the end in any case.
            Err(fs::TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => Ok(file),
            Err(fs::TryLockError::Error(e)) => Err(Error::io(&path, e)),
        }
    }

    /// Makes `path` of a commit stand for the content of `id`.
    pub(super) fn link(&self, commit: &str, path: &str, id: &ContentId) -> Result<PathBuf> {
        let (blob, pointer) = (self.blob(id), self.snapshot(commit).join(path));
        if same_file(&blob, &pointer) {
            return Ok(pointer);
        }
        if let Some(parent) = pointer.parent() {
            fs::create_dir_all(parent).map_err(|e| Error::io(parent, e))?;
        }
        match fs::remove_file(&pointer) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(Error::io(&pointer, e)),
            _ => {}
        }
        let up = "../".repeat(2 + path.matches('/').count());
        match point(Path::new(&format!("{up}blobs/{id}")), &blob, &pointer) {
            // Another process was faster.
            Err(_) if same_file(&blob, &pointer) => Ok(pointer),
            Err(e) => Err(Error::io(pointer, e)),
            Ok(()) => Ok(pointer),
        }
    }

    /// From now on the revision is this commit.
    pub(super) fn set_ref(&self, commit: &str) -> Result<()> {
        if self.revision == commit {
            return Ok(());
        }
        self.repo.create_ref(commit).map_err(|e| Error::io(self.folder.join("refs"), e))
    }

    /// The commit that the revision is, as far as is known here.
    pub(super) fn commit(&self) -> Option<String> {
        let path = self.folder.join("refs").join(&self.revision);
        let known = fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        known.filter(|c| is_commit(c)).or_else(|| is_commit(&self.revision).then(|| self.revision.clone()))
    }

    /// The revision's folder if every file of the model is in it, else what is missing, as words.
    pub(super) fn whole(&self) -> std::result::Result<PathBuf, String> {
        let commit = self.commit().ok_or_else(|| "it is not there".to_owned())?;
        let snapshot = self.snapshot(&commit);
        match select::missing(&snapshot) {
            None => Ok(snapshot),
            Some(missing) => Err(format!("{missing} is not there")),
        }
    }
}

#[cfg(unix)]
fn point(relative: &Path, _: &Path, pointer: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(relative, pointer)
}

/// Elsewhere links to files need rights that people do not have: a second name of the same file does as well.
#[cfg(not(unix))]
fn point(_: &Path, blob: &Path, pointer: &Path) -> std::io::Result<()> {
    fs::hard_link(blob, pointer)
}

fn same_file(blob: &Path, pointer: &Path) -> bool {
    match (fs::canonicalize(blob), fs::canonicalize(pointer)) {
        (Ok(a), Ok(b)) if a == b => true,
        (Ok(_), Ok(b)) => {
            cfg!(not(unix))
                && fs::metadata(blob).ok().map(|m| m.len()) == fs::metadata(b).ok().map(|m| m.len())
        }
        _ => false,
    }
}

/// The name `ORG/NAME` of a model whose snapshot is `folder`.
pub(crate) fn name_of_snapshot(folder: &Path) -> Option<String> {
    let snapshots = folder.parent()?;
    let model = snapshots.parent()?.file_name()?.to_str()?;
    (snapshots.file_name()? == "snapshots")
        .then(|| model.strip_prefix(MODELS).map(|n| n.replace("--", "/")))?
}

/// A model in the cache.
#[derive(Debug)]
pub(crate) struct Cached {
    /// `ORG/NAME`.
    pub(crate) name: String,
    /// Revisions by their names, with their folders.
    pub(crate) snapshots: BTreeMap<String, PathBuf>,
    /// Bytes of all contents on the disk, parts included.
    pub(crate) bytes: u64,
    /// Bytes of contents that are not whole yet.
    pub(crate) partial: u64,
}

/// The models in the cache at `root`, by name. A folder that is not there holds none.
pub(crate) fn cached(root: &Path) -> Result<Vec<Cached>> {
    let mut found = Vec::new();
    for folder in entries(root)? {
        let file_name = folder.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let Some(name) = file_name.strip_prefix(MODELS) else { continue };
        let (mut bytes, mut partial) = (0, 0);
        for blob in entries(&folder.join("blobs"))? {
            let length = fs::metadata(&blob).map_or(0, |m| m.len());
            bytes += length;
            if blob.extension().is_some_and(|e| e == "incomplete" || e == "part") {
                partial += length;
            }
        }
        bytes += plain_bytes(&folder.join("snapshots"))?;
        let mut snapshots = BTreeMap::new();
        let refs = folder.join("refs");
        for (revision, commit) in files_below(&refs, &refs)? {
            let snapshot = folder.join("snapshots").join(commit.trim());
            if is_commit(commit.trim()) && snapshot.is_dir() {
                snapshots.insert(revision, snapshot);
            }
        }
        for snapshot in entries(&folder.join("snapshots"))? {
            if !snapshots.values().any(|known| *known == snapshot) {
                let commit = snapshot.file_name().unwrap_or_default().to_string_lossy().into_owned();
                snapshots.insert(commit, snapshot);
            }
        }
        found.push(Cached { name: name.replace("--", "/"), snapshots, bytes, partial });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Bytes of files below a folder that are no links: some tools put contents there.
fn plain_bytes(folder: &Path) -> Result<u64> {
    // Where links are second names of contents, these are counted already.
    if cfg!(not(unix)) {
        return Ok(0);
    }
    let mut bytes = 0;
    for path in entries(folder)? {
        let Ok(found) = fs::symlink_metadata(&path) else { continue };
        bytes += if found.is_dir() { plain_bytes(&path)? } else { 0 };
        bytes += if found.is_file() { found.len() } else { 0 };
    }
    Ok(bytes)
}

/// What a folder holds; nothing when it is not there.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let listed = match fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(folder, e)),
        Ok(listed) => listed,
    };
    let mut paths = Vec::new();
    for entry in listed {
        paths.push(entry.map_err(|e| Error::io(folder, e))?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Files below a folder, by their path in it, with what they say. Revisions may have slashes in their names.
fn files_below(folder: &Path, root: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for path in entries(folder)? {
        if path.is_dir() {
            files.extend(files_below(&path, root)?);
        } else if let Ok(text) = fs::read_to_string(&path) {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            files.insert(name, text);
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn model(root: &Path) -> ModelCache {
        ModelCache::new(root, &"org/name@refs/pr/1".parse().unwrap())
    }

    #[cfg(unix)]
    #[test]
    fn files_that_are_no_links_are_counted_too() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("models--org--name");
        put(&folder.join("blobs/a"), "12345");
        put(&folder.join("snapshots").join(COMMIT).join("sub/plain"), "123");
        std::os::unix::fs::symlink("../../blobs/a", folder.join("snapshots").join(COMMIT).join("link"))
            .unwrap();
        assert_eq!(cached(root.path()).unwrap()[0].bytes, 8);
    }

    fn put(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn the_layout_is_the_one_of_the_python_tools() {
        let root = tempfile::tempdir().unwrap();
        let cache = model(root.path());
        let id = ContentId::Opaque("abc".into());
        put(&cache.blob(&id), "text");
        let folder = root.path().join("models--org--name");
        assert_eq!(cache.blob(&id), folder.join("blobs/abc"));
        assert_eq!(cache.part(&id), folder.join("blobs/abc.incomplete"));
        let pointer = cache.link(COMMIT, "sub/config.json", &id).unwrap();
        assert_eq!(pointer, folder.join("snapshots").join(COMMIT).join("sub/config.json"));
        #[cfg(unix)]
        assert_eq!(fs::read_link(&pointer).unwrap(), Path::new("../../../blobs/abc"));
        assert_eq!(fs::read_to_string(&pointer).unwrap(), "text");
        cache.set_ref(COMMIT).unwrap();
        assert_eq!(fs::read_to_string(folder.join("refs/refs/pr/1")).unwrap(), COMMIT);
        assert_eq!(cache.commit().as_deref(), Some(COMMIT));
        assert_eq!(name_of_snapshot(&cache.snapshot(COMMIT)).as_deref(), Some("org/name"));
        assert_eq!(name_of_snapshot(Path::new("/models/some--model")), None);
    }

    #[test]
    fn a_link_that_leads_elsewhere_is_set_right() {
        let root = tempfile::tempdir().unwrap();
        let cache = model(root.path());
        let (old, new) = (ContentId::Opaque("old".into()), ContentId::Opaque("new".into()));
        cache.link(COMMIT, "config.json", &old).unwrap_or_default();
        put(&cache.blob(&new), "new text");
        for _ in 0..2 {
            let pointer = cache.link(COMMIT, "config.json", &new).unwrap();
            assert_eq!(fs::read_to_string(pointer).unwrap(), "new text");
        }
    }

    #[test]
    fn a_lock_is_held_against_others() {
        let root = tempfile::tempdir().unwrap();
        let cache = model(root.path());
        let id = ContentId::Opaque("abc".into());
        let held = cache.lock(&id, || panic!("nobody has it")).unwrap();
        let path = root.path().join(".locks/models--org--name/abc.lock");
        assert!(File::open(&path).unwrap().try_lock().is_err());
        drop(held);
        cache.lock(&id, || panic!("nobody has it any more")).unwrap();
    }

    #[test]
    fn models_are_listed_with_their_revisions_and_sizes() {
        let root = tempfile::tempdir().unwrap();
        assert!(cached(&root.path().join("nowhere")).unwrap().is_empty());
        let cache = model(root.path());
        let id = ContentId::Opaque("abc".into());
        put(&cache.blob(&id), "text");
        put(&cache.part(&ContentId::Opaque("def".into())), "par");
        cache.link(COMMIT, "config.json", &id).unwrap();
        cache.set_ref(COMMIT).unwrap();
        put(&root.path().join("datasets--a--b/blobs/x"), "ignored");
        let found = cached(root.path()).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].bytes, found[0].partial), ("org/name", 7, 3));
        assert_eq!(found[0].snapshots["refs/pr/1"], cache.snapshot(COMMIT));
        assert_eq!(found[0].snapshots.len(), 1);
    }
}
