#include "tools/cli/agent_standing.hpp"

#include <algorithm>

namespace deltasync::cli {

Standing standing_of(const Json& page) {
  if (const Json& cut_off = page.at("cut_off"); !cut_off.is_null()) {
    return {
        "cut off for " + human_age(cut_off.at("seconds").get<double>()) + ": " + cut_off.at("why").get<std::string>(),
        "see to what it names; an agent that gets newer versions, beside this one in the receivers' list of "
        "endpoints, would be asked"};
  }
  const Json& writers = page.at("writers");
  const auto attached = std::count_if(writers.begin(), writers.end(),
                                      [](const Json& writer) { return writer.at("connected").get<bool>(); });
  const bool serves = !page.at("active").is_null();
  if (attached == 0) {
    return {serves ? "no trainer and no relay is attached: nothing newer comes until one is"
                   : "no version is served yet, and no trainer and no relay is attached",
            "start the trainer with this agent's socket; if it went on elsewhere, let receivers ask its agent, and end "
            "this one"};
  }
  const std::string writers_text = std::to_string(attached) + (attached == 1 ? " writer is" : " writers are");
  if (!serves) {
    return {"no version is served yet, though " + writers_text + " attached",
            "does the trainer offload? Its exception, or its log and the agent's, say what fails"};
  }
  return {"a version is served, and " + writers_text + " attached", ""};
}

}  // namespace deltasync::cli
