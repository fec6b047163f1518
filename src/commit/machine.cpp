#include "commit/machine.hpp"

namespace deltasync::commit {

template class MachineOf<AllGuards>;

std::string_view to_string(Action::Kind kind) noexcept {
  switch (kind) {
    case Action::Kind::none: return "none";
    case Action::Kind::read: return "read";
    case Action::Kind::write: return "write";
    case Action::Kind::wait: return "wait";
    case Action::Kind::word: return "word";
    case Action::Kind::commit: return "commit";
    case Action::Kind::roll_back: return "roll_back";
    case Action::Kind::void_weights: return "void_weights";
    case Action::Kind::done: return "done";
  }
  return "";
}

std::string_view to_string(Report::Ending ending) noexcept {
  switch (ending) {
    case Report::Ending::voted: return "voted";
    case Report::Ending::unwritten: return "unwritten";
    case Report::Ending::kept: return "kept";
    case Report::Ending::as_before: return "as_before";
    case Report::Ending::doubtful: return "doubtful";
  }
  return "";
}

}  // namespace deltasync::commit
