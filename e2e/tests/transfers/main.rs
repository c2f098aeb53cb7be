//! A Workspace with its disks goes into an archive and comes out of one, and whoever is killed or gives up, each archive
//! is whole or not there, and so is each Workspace.

mod archives;
mod gone;
mod isolated;
mod killed;
mod rights;
mod scene;
mod store;

use std::process::ExitCode;
use std::time::Duration;

use kibo_e2e::suite::Suite;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_workspace_goes_into_an_archive_and_comes_out_of_it_as_it_was", archives::there_and_back)
        .test("an_archive_goes_into_an_object_store_whole_or_not_at_all", store::through_a_store)
        .alone("a_transfer_leaves_nothing_half_wherever_the_operator_or_the_daemon_is_killed", killed::killed)
        .run()
}

const LIMIT: Duration = Duration::from_secs(120);
