// What `deltasync doctor` looks at: each check is one finding, with what is to be done about it. Nothing is changed,
// and nothing stays behind.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "deltasync/result.hpp"
#include "deltasync/tls.hpp"

namespace deltasync::cli {

struct Finding {
  enum class State : std::uint8_t { ok, warning, error };

  std::string check;  ///< what was looked at; scripts depend on these names
  State state = State::ok;
  std::string found;
  std::string remedy = {};     ///< empty if all is well
  Errc code = Errc::internal;  ///< of an error
};
std::string_view to_string(Finding::State state) noexcept;

Finding good(std::string check, std::string found);
Finding warning(std::string check, std::string found, std::string remedy);
Finding bad(std::string check, const Error& error, std::string remedy);
bool is_error(const Finding& finding);

/// Of one side: the host of an agent that is to start, or a receiver.
struct Access {
  std::string token_file;  ///< empty: none
  TlsOptions tls;          ///< none by default
};

/// Where an agent is to run, with the options that it is to have.
struct AgentHost {
  std::string name = "deltasync";
  std::string shm_dir = "/dev/shm";
  std::string model;   ///< a model directory, whose versions it is to serve; empty: not known
  std::string listen;  ///< HOST:PORT; empty: not looked at
  std::optional<std::size_t> receivers_max;
  Access access;
};
/// Shared memory, huge pages, memory, open files, port, token, certificates: in this order.
std::vector<Finding> check_agent_host(const AgentHost& host);

/// An agent that runs, as a receiver finds it.
struct AgentToAsk {
  std::string from;   ///< HOST:PORT for receivers; empty: not asked
  std::string pages;  ///< HOST:PORT of its pages; empty: not asked
  Access access;
  double deadline_s = 5;
};
/// Token, certificates, whether it is there, lets us in, and its release: in this order, as far as it comes.
std::vector<Finding> check_agent(const AgentToAsk& agent);

/// The files that `access` names, as a server (an agent) or a client (a receiver) has use for them.
enum class AccessSide : std::uint8_t { server, client };
std::vector<Finding> check_access(const Access& access, AccessSide side);

}  // namespace deltasync::cli
