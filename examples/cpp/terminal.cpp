// A chat for the terminal with an event loop of its own: one thread waits for keys and for the model at once. Answers
// stream while you type on; a line below says how fast they come and how full the cache is.
//
//   c++ -std=c++17 -o terminal terminal.cpp $(pkg-config --cflags --libs dsv4)
//   ./terminal MODEL
//
// Enter asks, also while an answer is on its way: yours is next then. Esc or Ctrl-C cancels the answer, Ctrl-D on an
// empty line ends the program. What was said stays in the terminal and its scrollback.

#include <dsv4.hpp>

#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cwchar>
#include <deque>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace {

// Takes the first character from a text that is not empty; its columns, or -1 if it is a control character.
int next_width(std::string_view &text)
{
    std::mbstate_t state{};
    wchar_t code = 0;
    const std::size_t length = std::mbrtowc(&code, text.data(), text.size(), &state);
    const bool is_valid = length > 0 && length <= text.size();
    text.remove_prefix(is_valid ? length : 1);
    return is_valid ? wcwidth(code) : -1;
}

int width_of(std::string_view text)
{
    int width = 0;
    while (!text.empty()) width += std::max(next_width(text), 0);
    return width;
}

// The terminal without echo, lines and signals of its own, until the object or the program ends. Below what was said are
// three lines that are drawn anew all the time: the unfinished one, the status, the input.
class Terminal {
public:
    Terminal()
    {
        tcgetattr(STDIN_FILENO, &before);
        termios raw = before;
        raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | ISIG);
        raw.c_iflag &= ~static_cast<tcflag_t>(IXON | ICRNL);
        struct sigaction action{};
        action.sa_flags = static_cast<int>(SA_RESETHAND);
        action.sa_handler = [](int signal) {
            restore();
            raise(signal); // now it ends the program
        };
        for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL})
            sigaction(signal, &action, nullptr);
        tcsetattr(STDIN_FILENO, TCSANOW, &raw);
        std::cout << "\n\n";
    }
    ~Terminal()
    {
        std::cout << "\r\033[1A\033[J" << std::flush;
        restore();
    }
    Terminal(const Terminal &) = delete;
    Terminal &operator=(const Terminal &) = delete;

    void say(std::string_view text)
    {
        while (!text.empty()) {
            const std::string_view rest = text;
            const int width = next_width(text);
            if (width >= 0 && width_of(line_) + width >= columns()) end_line(line_.rfind(' '));
            if (width >= 0) line_ += rest.substr(0, rest.size() - text.size()); // nothing that controls terminals
            if (rest[0] == '\n') end_line(line_.size());
        }
    }

    void draw(std::string_view status, std::string_view input)
    {
        for (int excess = width_of(input) + 3 - columns(); excess > 0;) excess -= std::max(next_width(input), 0);
        status = status.substr(0, static_cast<std::size_t>(columns() - 1));
        std::cout << "\r\033[2A\033[J" << std::exchange(finished_, "") << line_ << "\r\n\033[7m" << status
                  << "\033[m\r\n> " << input << std::flush;
    }

private:
    static void restore() { tcsetattr(STDIN_FILENO, TCSANOW, &before); }

    static int columns()
    {
        winsize size{};
        return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 8 ? size.ws_col : 80;
    }

    // Ends the line at a space or behind its last character; the rest begins the next.
    void end_line(std::size_t at)
    {
        finished_ += line_.substr(0, at) + "\r\n";
        line_ = at < line_.size() ? line_.substr(at + 1) : "";
    }

    static inline termios before;
    std::string finished_;
    std::string line_;
};

class Chat {
public:
    explicit Chat(const std::string &path)
        : model_(dsv4::Model::open(path)), engine_(dsv4::Engine::create(model_)),
          session_(dsv4::Session::create(engine_)), sampler_(dsv4::Sampler::create()), parser_(dsv4::ChatParser::create(model_))
    {
    }

    void run()
    {
        Terminal terminal;
        pollfd waits[] = {{STDIN_FILENO, POLLIN, 0}, {engine_.wake_fd(), POLLIN, 0}};
        while (!is_over_) {
            terminal.draw(status(), input_);
            const bool is_next = !request_ && !questions_.empty();
            if (poll(waits, 2, is_next ? 0 : -1) < 0) continue; // a signal
            if (waits[0].revents != 0) read_keys();
            try {
                // keys wait for a step: EngineOptions::prefill_chunk is the most that it takes of a prompt
                if (waits[1].revents != 0) engine_.step();
                if (request_) read_news(terminal);
                if (!request_ && !questions_.empty()) ask(terminal);
            } catch (const dsv4::Error &error) {
                end_answer(terminal, error.status() == dsv4::Status::cancelled ? "cancelled" : error.what());
            }
        }
    }

private:
    void ask(Terminal &terminal)
    {
        const std::string question = questions_.front();
        questions_.pop_front();
        terminal.say("> " + question + "\n");
        before_ = messages_;
        (messages_ += messages_.empty() ? "[" : ",") += R"({"role": "user", "content": )" + dsv4::quote(question) + "}";
        tokens_ = 0;
        note_ = "reading";
        parser_ = dsv4::ChatParser::create(model_);
        const dsv4::Prompt prompt = model_.render(messages_ + "]");
        // what the session has of the conversation is not computed again
        request_ = session_.submit_feed(prompt.tokens().drop(session_.keep_common(prompt.tokens())));
    }

    void read_news(Terminal &terminal)
    {
        dsv4::Finish finish = dsv4::Finish::none;
        for (const dsv4::RequestEvent &event : *request_) {
            event.check();
            finish = event.finish;
            if (event.kind == dsv4::RequestEventKind::progress) note_ = std::to_string(event.done) + " tokens read";
            if (event.kind != dsv4::RequestEventKind::piece) continue;
            tokens_++;
            parser_.push(event.token);
            say_events(terminal);
            const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin_;
            const std::string rate = std::to_string(tokens_ / time.count());
            note_ = std::to_string(tokens_) + " tokens, " + rate.substr(0, rate.find('.') + 2) + " a second";
        }
        if (!request_->ended()) return;
        if (finish != dsv4::Finish::none) return end_answer(terminal, note_);
        begin_ = std::chrono::steady_clock::now();
        request_ = session_.submit_generate(sampler_);
    }

    void end_answer(Terminal &terminal, const std::string &note)
    {
        note_ = note;
        request_.reset();
        parser_.finish();
        say_events(terminal);
        terminal.say("\n\n");
        // what was said of an answer that was cancelled stays in the conversation
        messages_ = tokens_ == 0 ? before_ : messages_ + "," + std::string(parser_.message());
    }

    void say_events(Terminal &terminal)
    {
        for (const dsv4::Event &event : parser_)
            if (event.kind == dsv4::EventKind::content) terminal.say(event.text);
    }

    std::string status() const
    {
        const dsv4::CacheStats cache = engine_.cache_stats();
        return " " + note_ + " | cache " + std::to_string(cache.used_bytes >> 10U) + " of " +
               std::to_string(cache.limit_bytes >> 10U) + " KiB ";
    }

    void read_keys()
    {
        char keys[4096]; // the bytes of a key that sends several come together
        const ssize_t n = read(STDIN_FILENO, keys, sizeof keys);
        is_over_ = n <= 0;
        for (ssize_t i = 0; i < n; i++) {
            if (keys[i] == '\x1b' && i + 1 < n) { // an arrow or the like, which mean nothing here
                for (i += 2; i < n && (keys[i] < '@' || keys[i] > '~');) i++;
            } else if (keys[i] == '\x1b' || keys[i] == 'C' - '@') {
                request_ ? session_.cancel() : input_.clear();
            } else if (keys[i] == 'D' - '@') {
                is_over_ = input_.empty();
            } else if (keys[i] == '\r') {
                if (!input_.empty()) questions_.push_back(std::exchange(input_, ""));
            } else if (keys[i] == '\x7f' || keys[i] == '\b') {
                while (!input_.empty() && (input_.back() & 0xc0) == 0x80) input_.pop_back(); // of one character
                if (!input_.empty()) input_.pop_back();
            } else if (static_cast<unsigned char>(keys[i]) >= ' ') {
                input_ += keys[i];
            }
        }
    }

    dsv4::Model model_;
    dsv4::Engine engine_;
    dsv4::Session session_;
    dsv4::Sampler sampler_;
    dsv4::ChatParser parser_;
    std::optional<dsv4::Request> request_;
    std::deque<std::string> questions_;
    std::string input_;
    std::string messages_; // a JSON array without its last bracket
    std::string before_;   // the same before the last question
    std::string note_ = "Enter asks, Esc cancels, Ctrl-D ends";
    int tokens_ = 0;
    std::chrono::steady_clock::time_point begin_;
    bool is_over_ = false;
};

} // namespace

int main(int argc, char **argv)
{
    if (argc != 2 || isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0) {
        std::cerr << "usage, in a terminal: terminal MODEL\n";
        return 2;
    }
    std::setlocale(LC_CTYPE, "");
    if (MB_CUR_MAX == 1) std::setlocale(LC_CTYPE, "C.UTF-8");
    try {
        Chat(argv[1]).run();
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
