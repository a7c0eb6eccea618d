#include "interrupt.h"

#include <unistd.h>

#include <csignal>
#include <initializer_list>

namespace longkv::cli {

namespace {

std::atomic<bool> g_interrupted{false};
std::atomic<int> g_signal{0};  // the last that set the flag
bool g_pipe_closed = false;
bool g_pipe_ignored = false;  // by the caller, who wants an error instead

void on_signal(int signal) {
  g_signal.store(signal);
  if (g_interrupted.exchange(true)) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

// A mapped model or state whose file shrank under the process: the pages are gone, nothing can go on.
void on_bus_error(int) {
  static constexpr char kText[] =
      "error: a mapped file (the model or a KV file) was cut or could not be read while in use\n";
  if (::write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0) ::_exit(1);
  ::_exit(1);
}

}  // namespace

void prepare_signals() {
  std::signal(SIGBUS, on_bus_error);
  g_pipe_ignored = std::signal(SIGPIPE, SIG_IGN) == SIG_IGN;
  std::signal(SIGXFSZ, SIG_IGN);
}

std::atomic<bool>* install_interrupt_flag() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    if (std::signal(signal, on_signal) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
  return &g_interrupted;
}

void note_closed_pipe() { g_pipe_closed = !g_pipe_ignored; }
bool pipe_was_closed() { return g_pipe_closed; }

int end_by_signal(int exit_code) {
  const int signal = g_pipe_closed ? SIGPIPE : g_interrupted.load() ? g_signal.load() : 0;
  if (exit_code == 0 || signal == 0) return exit_code;
  std::signal(signal, SIG_DFL);
  std::raise(signal);
  return exit_code;
}

}  // namespace longkv::cli
