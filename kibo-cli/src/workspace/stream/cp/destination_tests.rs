use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use super::*;

fn names(path: &str) -> Names {
    path.split('/').map(OsString::from).collect()
}

fn attributes(mode: u32) -> Attributes {
    let metadata = std::fs::metadata("/proc/self").unwrap();
    Attributes { mode, uid: metadata.uid().into(), gid: metadata.gid().into(), modified: 1_000_000_000 }
}

fn write(tree: &mut Tree, path: &str, text: &str) -> Result<(), Failure> {
    tree.file(&names(path), attributes(0o4751), &mut text.as_bytes(), text.len() as u64)
}

fn left_behind(directory: &Path) -> Vec<OsString> {
    let entries = std::fs::read_dir(directory).unwrap().flatten().map(|entry| entry.file_name());
    entries.filter(|name| name.as_encoded_bytes().starts_with(b".kibo-")).collect()
}

#[test]
fn files_have_their_mode_and_time_but_no_ones_rights() {
    let directory = tempfile::tempdir().unwrap();
    let mut tree = Tree::open(directory.path(), true).unwrap();
    tree.directory(&names("a"), attributes(0o555)).unwrap();
    write(&mut tree, "a/file", "text").unwrap();
    write(&mut tree, "made/on/the/way", "x").unwrap();
    tree.symbolic_link(&names("a/link"), Path::new("/etc/passwd"), attributes(0o777)).unwrap();
    tree.hard_link(&names("a/other"), &names("a/file")).unwrap();
    tree.hard_link(&names("a/other"), &names("a/file")).unwrap();
    tree.finish().unwrap();
    let file = directory.path().join("a/file").metadata().unwrap();
    assert_eq!((file.mode() & 0o7777, file.mtime(), file.nlink()), (0o751, 1_000_000_000, 2));
    let made = directory.path().join("a").metadata().unwrap();
    assert_eq!((made.mode() & 0o7777, made.mtime()), (0o555, 1_000_000_000));
    assert_eq!(std::fs::read_link(directory.path().join("a/link")).unwrap(), Path::new("/etc/passwd"));
    assert_eq!(left_behind(&directory.path().join("a")), Vec::<OsString>::new());
    std::fs::set_permissions(directory.path().join("a"), std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn no_entry_leaves_through_a_link() {
    let outside = tempfile::tempdir().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut tree = Tree::open(directory.path(), true).unwrap();
    tree.symbolic_link(&names("out"), outside.path(), attributes(0o777)).unwrap();
    let refused = |outcome: Result<(), Failure>| match outcome {
        Err(Failure::Local(error)) => assert_eq!(error.kind, Kind::FailedPrecondition, "{error}"),
        other => panic!("{other:?}"),
    };
    refused(write(&mut tree, "out/file", "x"));
    refused(tree.directory(&names("out/directory"), attributes(0o755)).map_err(Failure::from));
    refused(tree.directory(&names("out"), attributes(0o755)).map_err(Failure::from));
    std::fs::write(outside.path().join("secret"), "s").unwrap();
    refused(tree.hard_link(&names("stolen"), &names("out/secret")));
    symlink(outside.path().join("secret"), directory.path().join("to-file")).unwrap();
    refused(tree.hard_link(&names("stolen"), &names("to-file")));
    // A link at the place of a file gives way; what it leads to is not written.
    write(&mut tree, "to-file", "new").unwrap();
    assert_eq!(std::fs::read_to_string(outside.path().join("secret")).unwrap(), "s");
    assert_eq!(std::fs::read_to_string(directory.path().join("to-file")).unwrap(), "new");
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 1, "nothing was made outside");
}

#[test]
fn an_archive_that_breaks_off_leaves_the_old_file_and_nothing_half() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "old").unwrap();
    let mut tree = Tree::open(directory.path(), true).unwrap();
    let short = tree.file(&names("file"), attributes(0o644), &mut "half".as_bytes(), 100);
    assert!(matches!(short, Err(Failure::Archive(_))), "{short:?}");
    assert_eq!(std::fs::read_to_string(directory.path().join("file")).unwrap(), "old");
    assert_eq!(left_behind(directory.path()), Vec::<OsString>::new());
    std::fs::create_dir(directory.path().join("directory")).unwrap();
    assert!(matches!(write(&mut tree, "directory", "x"), Err(Failure::Local(_))), "a directory is not replaced");
    assert_eq!(left_behind(directory.path()), Vec::<OsString>::new());
}

#[test]
fn without_preserving_the_usual_rights_count() {
    let directory = tempfile::tempdir().unwrap();
    let mut tree = Tree::open(directory.path(), false).unwrap();
    tree.umask = 0o027;
    tree.file(&names("file"), attributes(0o4777), &mut "x".as_bytes(), 1).unwrap();
    let file = directory.path().join("file").metadata().unwrap();
    assert_eq!(file.mode() & 0o7777, 0o750);
    assert_ne!(file.mtime(), 1_000_000_000);
}

#[test]
fn where_a_copy_goes_is_as_cp_has_it() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    std::fs::write(root.join("file"), "").unwrap();
    std::fs::create_dir(root.join("there")).unwrap();
    symlink("file", root.join("link")).unwrap();
    let found = |path: &str, contents| Spot::find(Path::new(&format!("{}/{path}", root.display())), contents);
    let named = |name: &str, must_be| Spot::As { directory: root.clone(), name: name.into(), must_be };
    assert_eq!(found("there", false), Ok(Spot::Into(root.join("there"))));
    assert_eq!(found("new", false), Ok(named("new", MustBe::Anything)));
    assert_eq!(found("new/", false), Ok(named("new", MustBe::Directory)));
    assert_eq!(found("link", false), Ok(named("file", MustBe::File)), "a link is followed");
    assert_eq!(found("new", true), Ok(Spot::Contents(root.join("new"))));
    assert_eq!(found("no/such", false).unwrap_err().kind, Kind::NotFound);
    assert_eq!(found("file/x", false).unwrap_err().kind, Kind::FailedPrecondition);
    assert_eq!(found("file", true).unwrap_err().kind, Kind::FailedPrecondition);
    assert!(named("file", MustBe::File).check(true).is_err() && named("new", MustBe::Directory).check(false).is_err());
    assert!(found("new", true).unwrap().check(false).is_err());
}
