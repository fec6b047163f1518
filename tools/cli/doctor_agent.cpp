// An agent that runs, asked as a receiver and a monitor ask it.
#include <algorithm>

#include "format/wire.hpp"
#include "net/auth.hpp"
#include "net/endpoint.hpp"
#include "net/tls.hpp"
#include "receiver/connection.hpp"
#include "receiver/peer.hpp"
#include "tools/cli/agent_standing.hpp"
#include "tools/cli/doctor.hpp"
#include "tools/cli/follow.hpp"
#include "tools/cli/http_get.hpp"

namespace deltasync::cli {
namespace {

Result<receiver::Peer> peer_of(const AgentToAsk& agent) {
  receiver::Peer peer;
  DS_ASSIGN(const net::PeerEndpoint at, net::parse_peer_endpoint(agent.from));
  peer.addresses =
      std::make_shared<receiver::Addresses>(std::vector<receiver::Address>{{agent.from, at.at.host, at.at.port}});
  peer.name = "deltasync doctor";
  if (!agent.access.token_file.empty()) {
    DS_ASSIGN(peer.token, net::read_token_file(agent.access.token_file));
  }
  DS_ASSIGN(peer.tls, net::Tls::client_if_wanted(agent.access.tls));
  return peer;
}

constexpr const char* kIsItStopped =
    "is the agent stopped (ps shows T), or has it too much to do (--deadline-s)? is the address right";

/// What to do about a refused handshake, beside what its message says.
std::string handshake_remedy(Errc code) {
  switch (code) {
    case Errc::unauthenticated: return "give the same --token-file as the agent's, and a certificate that it trusts";
    case Errc::unsupported: return "TLS on both sides or on neither, and releases that share a protocol";
    case Errc::connection: return "is this the agent's --listen, and has it room (--receivers-max)?";
    case Errc::timed_out: return std::string(kIsItStopped) + ": its --listen, rather than its --http?";
    default: return "is this the agent's --listen, rather than its --http?";
  }
}

/// As `watch`: who connects so asks for nothing.
void check_conversation(const AgentToAsk& agent, const receiver::Peer& peer, std::vector<Finding>& findings) {
  const CallContext until{after_seconds(agent.deadline_s)};
  auto connection = receiver::Connection::dial(peer, until);
  if (!connection) {
    findings.push_back(bad("agent", connection.error(),
                           "is an agent running there, with this --listen (by default it is loopback), and does a "
                           "firewall let it through?"));
    return;
  }
  findings.push_back(good("agent", agent.from + " answers"));
  const Status let_in = connection->handshake(peer, wire::Role::watch, after_seconds(agent.deadline_s));
  if (!let_in) {
    findings.push_back(bad("handshake", let_in.error(), handshake_remedy(let_in.error().code())));
    return;
  }
  std::string found = peer.tls ? "over TLS, " : "";
  found += peer.token.empty() ? "without --token-file" : "the agent takes the token, and has it too";
  findings.push_back(good("handshake", found));
  const std::string protocol = "both speak protocol " + std::to_string(connection->protocol());
  if (connection->protocol() == wire::kProtocolVersion) {
    findings.push_back(good("protocol", protocol));
  } else {
    findings.push_back(warning("protocol", protocol + "; this end also " + std::to_string(wire::kProtocolVersion),
                               "nothing has to be done; a newer agent can do more"));
  }
}

/// The value of the label `version` of deltasync_build_info; empty if the page has none.
std::string release_on(std::string_view metrics) {
  const auto line = metrics.find("\ndeltasync_build_info{");
  if (line == std::string_view::npos) return {};
  constexpr std::string_view kLabel = "version=\"";
  const auto begin = metrics.find(kLabel, line);
  if (begin == std::string_view::npos) return {};
  const auto from = begin + kLabel.size();
  return std::string(metrics.substr(from, metrics.find('"', from) - from));
}

Result<std::string> ask(const AgentToAsk& agent, const char* page) {
  DS_ASSIGN(const tools::HttpSource source, tools::parse_http_source(agent.pages, agent.access.tls));
  return tools::http_get(source, page, after_seconds(agent.deadline_s));
}

Result<std::string> ask_release(const AgentToAsk& agent) {
  DS_ASSIGN(const std::string page, ask(agent, "/metrics"));
  std::string release = release_on(page);
  if (release.empty()) return Error(Errc::protocol, "its page /metrics has no deltasync_build_info");
  return release;
}

Finding check_release(const AgentToAsk& agent) {
  const char* const check = "release";
  const auto theirs = ask_release(agent);
  if (!theirs) {
    const char* remedy = "name the agent's --http";
    if (theirs.error().code() == Errc::connection) remedy = "is an agent running there, with this --http?";
    const bool late = theirs.error().code() == Errc::timed_out;
    return bad(check, Error(theirs.error()).with_context(agent.pages),
               late ? std::string(kIsItStopped) + ": its --http?" : remedy);
  }
  if (*theirs == DELTASYNC_VERSION) return good(check, "both ends are " + *theirs);
  return warning(check, agent.pages + " is " + *theirs + ", this is " DELTASYNC_VERSION,
                 "they work together as far as both speak one protocol; bring both to one release");
}

/// Pages of a receiver or a relay have no such check.
void check_standing(const AgentToAsk& agent, std::vector<Finding>& findings) {
  const char* const check = "versions";
  const auto body = ask(agent, "/v1/status");
  if (!body) {
    findings.push_back(bad(check, Error(body.error()).with_context(agent.pages), kIsItStopped));
    return;
  }
  try {
    const Json page = Json::parse(*body);
    if (page.contains("role")) return;
    Standing standing = standing_of(page);
    findings.push_back(standing.remedy.empty() ? good(check, standing.found)
                                               : warning(check, standing.found, standing.remedy));
  } catch (const Json::exception& e) {
    findings.push_back(bad(check,
                           Error(Errc::protocol, agent.pages + ": a status page of another release: " + e.what()),
                           "bring both to one release"));
  }
}

}  // namespace

std::vector<Finding> check_agent(const AgentToAsk& agent) {
  std::vector<Finding> findings = check_access(agent.access, AccessSide::client);
  if (!agent.from.empty()) {
    if (const auto peer = peer_of(agent)) {
      check_conversation(agent, *peer, findings);
    } else if (std::ranges::none_of(findings, is_error)) {
      findings.push_back(bad("agent", peer.error(), "--from HOST:PORT"));
    }  // else: a file that is named above stands in the way
  }
  if (!agent.pages.empty()) {
    findings.push_back(check_release(agent));
    if (!is_error(findings.back())) check_standing(agent, findings);
  }
  return findings;
}

}  // namespace deltasync::cli
