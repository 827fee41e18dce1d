// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

/// A program that runs beside this one and is talked to line by line. What it writes as errors is
/// added to a file. It is expected to end when its input does.
class ChildProcess {
 public:
  ChildProcess(std::vector<std::string> command, const std::filesystem::path& errors) {
    int to_child[2], from_child[2];
    if (pipe2(to_child, O_CLOEXEC) != 0) fail("pipe");
    if (pipe2(from_child, O_CLOEXEC) != 0) fail("pipe");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_child[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from_child[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, errors.c_str(),
                                     O_WRONLY | O_CREAT | O_APPEND, 0644);
    std::vector<char*> arguments;
    for (std::string& argument : command) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    const int status =
        posix_spawnp(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(to_child[0]);
    close(from_child[1]);
    to_ = fdopen(to_child[1], "w");
    from_ = from_child[0];
    if (status != 0) {
      std::fclose(to_);
      close(from_);
      throw std::system_error(status, std::generic_category(), "cannot start '" + command[0] + "'");
    }
    std::signal(SIGPIPE, SIG_IGN);  // a child that ended is seen by its end of output
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  ~ChildProcess() {
    std::fclose(to_);
    close(from_);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }

  void write_line(const std::string& line) {
    std::fputs((line + '\n').c_str(), to_);
    std::fflush(to_);
  }

  /// The next line, without its end; nothing at the end of the output, or after `seconds` without
  /// output, when the child is killed and was_killed(). With 0 or less: a line that is there.
  std::optional<std::string> read_line(double seconds = std::numeric_limits<double>::infinity()) {
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
      const std::size_t end = unread_.find('\n');
      if (end != std::string::npos) {
        std::string line = unread_.substr(0, end);
        unread_.erase(0, end + 1);
        return line;
      }
      const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - begin;
      pollfd output{.fd = from_, .events = POLLIN, .revents = 0};
      const double left = std::clamp(seconds - gone.count(), 0., 60.);
      if (poll(&output, 1, static_cast<int>(std::ceil(left * 1000.))) <= 0) {
        if (gone.count() < seconds) continue;
        kill(pid_, SIGKILL);
        was_killed_ = true;
        return std::nullopt;
      }
      char text[4096];
      const ssize_t count = read(from_, text, sizeof text);
      if (count > 0) {
        unread_.append(text, static_cast<std::size_t>(count));
      } else if (count == 0 || errno != EINTR) {
        return std::nullopt;
      }
    }
  }
  bool was_killed() const { return was_killed_; }

 private:
  [[noreturn]] static void fail(const char* call) {
    throw std::system_error(errno, std::generic_category(), call);
  }

  pid_t pid_ = -1;
  std::FILE* to_ = nullptr;
  int from_ = -1;
  std::string unread_;
  bool was_killed_ = false;
};
