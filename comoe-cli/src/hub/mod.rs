//! Models by name: fetched once from the hub, kept in the folder that the Python tools use too.
//!
//! The `hf-hub` crate knows the hub's address, its paths and the cache's layout. The transfer is ours: that crate's takes
//! one file at a time, believes a body of any length and content, does not wait as a server asks, and does not tell a
//! gated repository from a missing one.

mod cache;
mod client;
mod content;
mod error;
mod fetch;
mod headers;
mod name;
mod progress;
mod retry;
mod select;

use std::path::{Path, PathBuf};

use comoe_core::stats::human_bytes;
use comoe_models::arch;
use comoe_models::load::ConfigFile;
use indicatif::HumanDuration;

use self::cache::ModelCache;
pub(crate) use self::cache::{Cached, cached, name_of_snapshot};
use self::client::{Client, Listing, RemoteFile};
pub(crate) use self::error::Error;
use self::fetch::Fetch;
pub(crate) use self::headers::HeadersFolder;
pub(crate) use self::name::RepoName;
use self::progress::Progress;
pub(crate) use self::select::missing;
use crate::error::Result;
use crate::output::say;
use crate::places::HubPlaces;
use crate::sys;

/// Room to leave on the disk.
const MARGIN: u64 = 64 << 20;

/// The folder of a model: the one in the cache when it is whole, without asking anybody; else it is fetched.
///
/// # Errors
/// [`Error::Offline`] when it would have to be fetched and must not, and those of [`pull`].
pub(crate) fn find(name: &RepoName, quiet: bool) -> Result<PathBuf> {
    let places = HubPlaces::from_env()?;
    match ModelCache::new(&places.cache, name).whole() {
        Ok(folder) => Ok(folder),
        Err(missing) => {
            offline(&places, name, missing)?;
            if !quiet {
                say!(
                    "{name}: no such folder here, and not whole in {}; asking the hub",
                    places.cache.display()
                );
            }
            fetch(&places, name, quiet, false)
        }
    }
}

/// Brings the newest files of a model's revision; its folder. With `check`, what is here already is read, and fetched again
/// where it is damaged.
///
/// # Errors
/// Says what to do: about a repository that is missing, gated or holds no model of a family that works, about the
/// network, about the disk.
pub(crate) fn pull(name: &RepoName, quiet: bool, check: bool) -> Result<PathBuf> {
    let places = HubPlaces::from_env()?;
    let whole = ModelCache::new(&places.cache, name).whole();
    if places.offline
        && let Ok(folder) = whole
    {
        say!("note: HF_HUB_OFFLINE is set: {name} is what it was when it was pulled");
        return Ok(folder);
    }
    offline(&places, name, whole.err().unwrap_or_default())?;
    fetch(&places, name, quiet, check)
}

fn offline(places: &HubPlaces, name: &RepoName, missing: String) -> Result<()> {
    match places.offline {
        true => Err(Error::Offline { repo: name.to_string(), missing, cache: places.cache.clone() }.into()),
        false => Ok(()),
    }
}

/// A repository whose model can run, as far as its configuration tells: that is here, and its index.
struct Known {
    client: Client,
    cache: ModelCache,
    listing: Listing,
    /// Small files to take, the configuration among them.
    small: Vec<String>,
    /// Files with weights.
    weights: Vec<String>,
}

impl Known {
    /// Asks the hub. A model that cannot run is refused before its weights are fetched.
    fn ask(places: &HubPlaces, name: &RepoName, check: bool) -> Result<Self> {
        let client = Client::new(places, name.clone())?;
        let cache = ModelCache::new(&places.cache, name);
        let listing = client.list()?;
        let paths = || listing.files.iter().map(|f| f.path.as_str()).filter(|p| select::safe(p));
        let no_model = |reason| Error::NoModel { repo: name.to_string(), reason };
        let small = select::small(paths());
        if !small.contains(&select::CONFIG) {
            let reason = select::weights(paths(), None).err();
            let reason = reason.unwrap_or_else(|| format!("it has no {}", select::CONFIG));
            return Err(no_model(reason).into());
        }
        let commit = listing.commit.as_str();
        let first: Vec<&str> =
            small.iter().copied().filter(|f| [select::CONFIG, select::INDEX].contains(f)).collect();
        let first = describe(&client, &listing, &first)?;
        let progress = Progress::new(first.len(), first.iter().map(|f| f.size).sum(), true);
        let bytes = first.iter().map(|f| f.size).fold(0, u64::saturating_add);
        check_space(name, &cache.snapshot(commit), bytes)?;
        Fetch { client: &client, cache: &cache, commit, progress: &progress, check }.all(&first)?;
        let snapshot = cache.snapshot(commit);
        arch::plan(&ConfigFile::of_model(&snapshot)?)?;
        let index = small.contains(&select::INDEX).then(|| snapshot.join(select::INDEX));
        let index = index.map(|path| select::read_index(&path).map_err(|source| Error::Io { path, source }));
        let weights = select::weights(paths(), index.transpose()?.as_deref()).map_err(no_model)?;
        let owned = |files: Vec<&str>| files.into_iter().map(str::to_owned).collect();
        let (small, weights) = (owned(small), owned(weights));
        Ok(Self { client, cache, listing, small, weights })
    }

    fn describe(&self, files: &[String]) -> Result<Vec<RemoteFile>> {
        describe(&self.client, &self.listing, &files.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// Sizes and contents of files.
fn describe(client: &Client, listing: &Listing, wanted: &[&str]) -> Result<Vec<RemoteFile>> {
    let listed = listing.files.iter().filter(|f| wanted.contains(&f.path.as_str()));
    let described = listed.map(|f| client.complete(f, &listing.commit));
    Ok(described.collect::<std::result::Result<_, _>>()?)
}

/// A model to plan for: its folder in the cache when it is whole, else its configuration and headers alone, fetched to a
/// folder that goes with the result.
///
/// # Errors
/// As [`find`].
pub(crate) fn headers(name: &RepoName, quiet: bool) -> Result<std::result::Result<PathBuf, HeadersFolder>> {
    let places = HubPlaces::from_env()?;
    let missing = match ModelCache::new(&places.cache, name).whole() {
        Ok(folder) => return Ok(Ok(folder)),
        Err(missing) => missing,
    };
    offline(&places, name, missing)?;
    let known = Known::ask(&places, name, false)?;
    let snapshot = known.cache.snapshot(&known.listing.commit);
    let small = [select::CONFIG, select::INDEX].map(|f| snapshot.join(f));
    let small: Vec<PathBuf> = small.into_iter().filter(|path| path.is_file()).collect();
    let weights = known.describe(&known.weights)?;
    let folder = HeadersFolder::fetch(&known.client, &known.listing.commit, &small, &weights)?;
    if !quiet {
        let (files, bytes) = (weights.len(), weights.iter().map(|f| f.size).fold(0, u64::saturating_add));
        say!(
            "{name}: {} of headers fetched, of {files} files with {}",
            human_bytes(folder.fetched),
            human_bytes(bytes)
        );
    }
    Ok(Err(folder))
}

fn fetch(places: &HubPlaces, name: &RepoName, quiet: bool, check: bool) -> Result<PathBuf> {
    let known = Known::ask(places, name, check)?;
    let Known { client, cache, listing, small, weights } = &known;
    let commit = listing.commit.as_str();
    let snapshot = cache.snapshot(commit);
    let mut files = known.describe(small)?;
    files.extend(known.describe(weights)?);
    let bytes = files.iter().map(|f| f.size).fold(0, u64::saturating_add);
    let progress = Progress::new(files.len(), bytes, quiet);
    let fetch = Fetch { client, cache, commit, progress: &progress, check };
    let lacking = fetch.lacking(&files);
    check_space(name, &snapshot, lacking)?;
    if lacking > 0 && !quiet {
        let (lacking, bytes) = (human_bytes(lacking), human_bytes(bytes));
        progress.say(&format!("pulling {name}: {lacking} of {bytes} to {}", places.cache.display()));
    }
    fetch.all(&files)?;
    // Last, so that a name never stands for a model that is not whole.
    cache.set_ref(commit)?;
    let (fetched, took) = (progress.fetched(), progress.took());
    drop(progress);
    if !quiet {
        let rate = human_bytes((fetched as f64 / took.as_secs_f64()) as u64);
        match fetched {
            0 => {
                let whole = if check { ", and whole" } else { "" };
                say!("{name}: all {} files are here already ({}){whole}", files.len(), human_bytes(bytes));
            }
            _ => say!(
                "{name}: {} files, {}; {} fetched in {} ({rate}/s)",
                files.len(),
                human_bytes(bytes),
                human_bytes(fetched),
                HumanDuration(took)
            ),
        }
    }
    Ok(snapshot)
}

/// Refuses what the disk has no room for.
fn check_space(name: &RepoName, folder: &Path, needed: u64) -> Result<()> {
    // The folder itself may not be there yet.
    let there = folder.ancestors().find(|f| f.is_dir()).unwrap_or(folder);
    match sys::free_space(there) {
        Some(free) if needed > 0 && needed.saturating_add(MARGIN) > free => {
            Err(Error::NoSpace { repo: name.to_string(), needed, free, folder: there.to_owned() }.into())
        }
        _ => Ok(()),
    }
}
