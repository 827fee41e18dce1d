// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
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
    from_ = fdopen(from_child[0], "r");
    if (status != 0) {
      std::fclose(to_);
      std::fclose(from_);
      throw std::system_error(status, std::generic_category(), "cannot start '" + command[0] + "'");
    }
    std::signal(SIGPIPE, SIG_IGN);  // a child that ended is seen by its end of output
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  ~ChildProcess() {
    std::fclose(to_);
    std::fclose(from_);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }

  void write_line(const std::string& line) {
    std::fputs((line + '\n').c_str(), to_);
    std::fflush(to_);
  }

  /// The next line, without its end; nothing at the end of the output.
  std::optional<std::string> read_line() {
    std::string line;
    for (int letter = std::fgetc(from_); letter != EOF; letter = std::fgetc(from_)) {
      if (letter == '\n') return line;
      line += static_cast<char>(letter);
    }
    return std::nullopt;
  }

 private:
  [[noreturn]] static void fail(const char* call) {
    throw std::system_error(errno, std::generic_category(), call);
  }

  pid_t pid_ = -1;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
};
