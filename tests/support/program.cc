#include "support/program.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <thread>

#include "support/mkgguf.h"
#include "support/paths.h"

namespace longkv::test {

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLimit = 200;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

struct Pipe {
  int read = -1, write = -1;

  explicit Pipe(bool wanted) {
    int fds[2];
    if (wanted && ::pipe2(fds, O_CLOEXEC) == 0) read = fds[0], write = fds[1];
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() { close_read(), close_write(); }
  void close_read() { close(read); }
  void close_write() { close(write); }

 private:
  static void close(int& fd) {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
};

// A terminal whose other end is here: types a text and writes down what is printed.
class Terminal {
 public:
  Terminal(bool wanted, std::string text, const std::string& shown) : text_(std::move(text)) {
    if (!wanted) return;
    fd_ = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (fd_ < 0 || ::grantpt(fd_) != 0 || ::unlockpt(fd_) != 0) return;
    if (const char* name = ::ptsname(fd_)) path = name;
    termios plain{};
    // Held open: without a user the far end counts as hung up.
    user_ = ::open(path.c_str(), O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (user_ < 0 || ::tcgetattr(user_, &plain) != 0) return;
    ::cfmakeraw(&plain);
    (void)::tcsetattr(user_, TCSANOW, &plain);
    (void)::fcntl(fd_, F_SETFL, O_NONBLOCK);
    shown_.open(shown, std::ios::binary | std::ios::trunc);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;
  ~Terminal() {
    for (const int fd : {user_, fd_})
      if (fd >= 0) ::close(fd);
  }
  void attend() {
    if (fd_ < 0) return;
    const ssize_t typed = ::write(fd_, text_.data() + typed_, text_.size() - typed_);
    if (typed > 0) typed_ += size_t(typed);
    char bytes[4096];
    for (ssize_t n = 0; (n = ::read(fd_, bytes, sizeof(bytes))) > 0;) shown_.write(bytes, n);
    shown_.flush();
  }
  std::string path;  // of the user's end

 private:
  int fd_ = -1, user_ = -1;
  std::string text_;
  size_t typed_ = 0;
  std::ofstream shown_;
};

// The functions below run in the child between fork and exec: only calls that are safe there.

void redirect(int fd, const char* path, int flags) {
  const int file = ::open(path, flags, 0600);
  if (file < 0 || ::dup2(file, fd) != fd) ::_exit(126);
  if (file != fd) ::close(file);
}

void prepare_child(const ProgramInput& input) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) ::signal(signal, SIG_DFL);
  if (input.ignored_signal != 0) ::signal(input.ignored_signal, SIG_IGN);
  if (input.file_limit >= 0) {
    const rlimit limit{rlim_t(input.file_limit), rlim_t(input.file_limit)};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(125);
  }
  if (input.memory_limit >= 0) {
    const rlimit limit{rlim_t(input.memory_limit), rlim_t(input.memory_limit)};
    if (::setrlimit(RLIMIT_AS, &limit) != 0) ::_exit(125);
  }
}

// Waits for the child; on the way sends the signal that the input asks for.
int wait_for(pid_t child, const ProgramInput& input, const std::string& out, const std::string& err, Terminal& terminal,
             Clock::time_point& begin) {
  int status = 0;
  for (bool sent = false; ::waitpid(child, &status, WNOHANG) == 0;) {
    terminal.attend();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (input.signal_when && !sent) {
      Outcome so_far;
      so_far.out = file_bytes(out);
      so_far.err = file_bytes(err);
      if (input.signal_when(so_far)) {
        ::kill(child, input.signal);
        sent = true;
        begin = Clock::now();
      }
    }
    if (seconds_since(begin) > kLimit) ::kill(child, SIGKILL);
  }
  terminal.attend();
  return status;
}

}  // namespace

Outcome longkv_program(const Args& args, const ProgramInput& input) {
  const std::string program = std::string(LONGKV_BINARY_DIR) + "/longkv";
  const std::string in = write_temp("program.in", input.text);
  const std::string out = input.out_path.empty() ? temp_path("program.out") : input.out_path;
  const std::string err = temp_path("program.err");
  // What an earlier run printed must not be taken for this one's.
  if (input.out_path.empty()) ::unlink(out.c_str());
  ::unlink(err.c_str());
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const std::string& a : args) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  std::vector<char*> environment;
  for (char** e = environ; *e != nullptr; ++e) {
    if (!std::string_view(*e).starts_with("CUDA_VISIBLE_DEVICES=")) environment.push_back(*e);
  }
  std::string no_cards = "CUDA_VISIBLE_DEVICES=";
  environment.push_back(no_cards.data());
  for (const std::string& e : input.environment) environment.push_back(const_cast<char*>(e.c_str()));
  environment.push_back(nullptr);
  Pipe stdin_pipe(input.keep_open), stdout_pipe(input.close_out_early);
  Terminal terminal(input.terminal, input.text, err);
  if (input.terminal && terminal.path.empty()) return {};
  if (input.keep_open && ::write(stdin_pipe.write, input.text.data(), input.text.size()) < 0) return {};

  auto begin = Clock::now();
  const pid_t child = ::fork();
  if (child < 0) return {};
  if (child == 0) {
    if (input.terminal) {
      redirect(STDERR_FILENO, terminal.path.c_str(), O_RDWR | O_NOCTTY);
    } else {
      redirect(STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC);
    }
    if (input.terminal) {
      redirect(STDIN_FILENO, terminal.path.c_str(), O_RDWR | O_NOCTTY);
    } else if (input.keep_open) {
      ::dup2(stdin_pipe.read, STDIN_FILENO);
    } else {
      redirect(STDIN_FILENO, in.c_str(), O_RDONLY);
    }
    if (input.close_out_early) {
      ::dup2(stdout_pipe.write, STDOUT_FILENO);
    } else {
      redirect(STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC);
    }
    if (input.close_out) ::close(STDOUT_FILENO);
    prepare_child(input);
    ::execve(program.c_str(), argv.data(), environment.data());
    ::_exit(127);
  }
  stdin_pipe.close_read();
  stdout_pipe.close_write();
  char first = 0;
  if (input.close_out_early && ::read(stdout_pipe.read, &first, 1) >= 0) stdout_pipe.close_read();

  Outcome outcome;
  const int status = wait_for(child, input, out, err, terminal, begin);
  outcome.seconds = seconds_since(begin);
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  if (input.out_path.empty() && !input.close_out_early) outcome.out = file_bytes(out);
  outcome.err = file_bytes(err);
  return outcome;
}

Args join(Args args, std::initializer_list<std::string> more) {
  args.insert(args.end(), more);
  return args;
}

::testing::AssertionResult refuses(const Outcome& o, int code, const std::string& message) {
  if (o.exit_code != code) {
    return ::testing::AssertionFailure() << "exit code " << o.exit_code << ", signal " << o.signal << "; " << o.err;
  }
  if (o.err.find("error: ") == std::string::npos || o.err.find(message) == std::string::npos) {
    return ::testing::AssertionFailure() << "'" << message << "' is not in: " << o.err;
  }
  if (o.err.find("internal") != std::string::npos) return ::testing::AssertionFailure() << o.err;
  if (!o.out.empty()) return ::testing::AssertionFailure() << "printed: " << o.out;
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult succeeds(const Outcome& o) {
  if (o.exit_code == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "exit code " << o.exit_code << ", signal " << o.signal << "; " << o.err;
}

nlohmann::json parsed(const Outcome& o) {
  EXPECT_TRUE(succeeds(o));
  nlohmann::json j = nlohmann::json::parse(o.out, nullptr, false);
  EXPECT_FALSE(j.is_discarded()) << o.out;
  return j;
}

std::vector<nlohmann::json> parsed_lines(const Outcome& o) {
  std::vector<nlohmann::json> documents;
  for (size_t begin = 0; begin < o.out.size();) {
    const size_t end = std::min(o.out.find('\n', begin), o.out.size());
    documents.push_back(nlohmann::json::parse(o.out.substr(begin, end - begin), nullptr, false));
    EXPECT_FALSE(documents.back().is_discarded()) << o.out;
    begin = end + 1;
  }
  return documents;
}

std::string file_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

}  // namespace longkv::test
