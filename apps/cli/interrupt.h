// Signals: what ends the program, and how it ends.
#pragma once

#include <atomic>

namespace longkv::cli {

// A reader that went away and a file that may not grow become errors of the write that meets them, so that nothing half
// written is left. Call first.
void prepare_signals();

// Set by Ctrl-C (SIGINT), SIGTERM and SIGHUP once installed, but for those that the caller ignores (nohup). A second
// signal ends the process at once.
std::atomic<bool>* install_interrupt_flag();

// Standard output's reader went away. The process then ends as a program in a pipe does: without a word, by SIGPIPE.
void note_closed_pipe();
bool pipe_was_closed();

// Ends a run that a signal stopped by that signal, so that the shell sees 130 for Ctrl-C and stops its own loops; any
// other exit code is returned.
int end_by_signal(int exit_code);

}  // namespace longkv::cli
