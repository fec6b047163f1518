#include "tools/cli/doctor.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "net/auth.hpp"
#include "net/tls.hpp"
#include "net/tls_expiry.hpp"

namespace deltasync::cli {
namespace {

Finding check_token_file(const std::string& file) {
  const auto token = net::read_token_file(file);
  if (token) return good("token", file + ": " + std::to_string(token->size()) + " bytes, for its owner only");
  if (token.error().code() == Errc::permission) {
    struct stat info {};
    const bool own = ::stat(file.c_str(), &info) == 0 && info.st_uid == ::geteuid();
    return bad("token", token.error(),
               own ? "chmod 600 " + file : "run this as the user who runs what is to use it, to whom it has to belong");
  }
  return bad("token", token.error(), "name the file that the agent has, of at least 16 bytes: openssl rand -hex 32");
}

Finding check_tls_files(const TlsOptions& tls, AccessSide side) {
  const auto made = side == AccessSide::server ? net::Tls::server(tls) : net::Tls::client(tls);
  if (!made) return bad("tls", made.error(), "the guide of security says how certificates are made and renewed");
  const auto end = (*made)->certificates_end();
  if (!end) return good("tls", "its CA can be read; no certificate of this side");
  std::string until = "certificates until " + net::date_of(*end);
  if (*end - std::chrono::system_clock::now() > std::chrono::hours(24)) return good("tls", std::move(until));
  return warning("tls", std::move(until), "renew them: new files are read without a restart");
}

}  // namespace

std::string_view to_string(Finding::State state) noexcept {
  switch (state) {
    case Finding::State::ok: return "ok";
    case Finding::State::warning: return "warning";
    case Finding::State::error: return "error";
  }
  return "unknown";
}

Finding good(std::string check, std::string found) {
  return {.check = std::move(check), .found = std::move(found)};
}

Finding warning(std::string check, std::string found, std::string remedy) {
  return {std::move(check), Finding::State::warning, std::move(found), std::move(remedy)};
}

Finding bad(std::string check, const Error& error, std::string remedy) {
  return {std::move(check), Finding::State::error, error.message(), std::move(remedy), error.code()};
}

bool is_error(const Finding& finding) {
  return finding.state == Finding::State::error;
}

std::vector<Finding> check_access(const Access& access, AccessSide side) {
  std::vector<Finding> findings;
  if (!access.token_file.empty()) findings.push_back(check_token_file(access.token_file));
  if (access.tls.wanted()) findings.push_back(check_tls_files(access.tls, side));
  return findings;
}

}  // namespace deltasync::cli
