// What is logged while this lives, in place of where it went before. Make it before the threads that log, and keep it
// longer.
#pragma once

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <mutex>
#include <string>

#include "base/log.hpp"

namespace deltasync::test {

class LogLines {
 public:
  LogLines() { spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", sink_)); }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;
  ~LogLines() { spdlog::set_default_logger(before_); }
  std::string text() const { return sink_->text(); }
  bool has(const std::string& part) const { return text().find(part) != std::string::npos; }

 private:
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    std::string text() {
      const std::lock_guard lock(mutex_);
      return text_;
    }

   private:
    void sink_it_(const spdlog::details::log_msg& line) override {
      text_.append(line.payload.data(), line.payload.size()).append("\n");
    }
    void flush_() override {}
    std::string text_;  // protected by mutex_
  };

  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  const std::shared_ptr<Sink> sink_ = std::make_shared<Sink>();
};

}  // namespace deltasync::test
