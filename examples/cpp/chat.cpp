// Loads a model and chats: keeps the conversation and streams each answer.
//
//   c++ -std=c++17 -o chat chat.cpp $(pkg-config --cflags --libs dsv4)
//   ./chat MODEL "What is the capital of France?"    one question
//   ./chat MODEL                                     a line of standard input each

#include <dsv4.hpp>

#include <iostream>
#include <string>

namespace {

class Conversation {
public:
    explicit Conversation(const std::string &path)
        : model_(dsv4::Model::open(path)), engine_(dsv4::Engine::create(model_)),
          session_(dsv4::Session::create(engine_)), sampler_(dsv4::Sampler::create())
    {
    }

    void ask(const std::string &question)
    {
        messages_ += messages_.empty() ? "[" : ",";
        messages_ += R"({"role": "user", "content": )" + dsv4::quote(question) + "}";
        // what the session has of the conversation is not computed again
        session_.sync(model_.render(messages_ + "]").tokens());
        dsv4::GenerationOptions options;
        options.max_tokens = 200;
        dsv4::Answer answer(session_.generate(sampler_, options), dsv4::ChatParser::create(model_));
        for (const dsv4::Event &event : answer)
            if (event.kind == dsv4::EventKind::content) std::cout << event.text << std::flush;
        std::cout << '\n';
        (messages_ += ',') += answer.message();
    }

private:
    dsv4::Model model_;
    dsv4::Engine engine_;
    dsv4::Session session_;
    dsv4::Sampler sampler_;
    std::string messages_; // a JSON array without its last bracket
};

} // namespace

int main(int argc, char **argv)
{
    if (argc < 2) {
        std::cerr << "usage: chat MODEL [QUESTION]\n";
        return 2;
    }
    try {
        dsv4::check_version();
        Conversation conversation(argv[1]);
        if (argc > 2) {
            conversation.ask(argv[2]);
            return 0;
        }
        for (std::string line; std::cerr << "> ", std::getline(std::cin, line);) conversation.ask(line);
    } catch (const dsv4::Error &error) {
        std::cerr << error.name() << ": " << error.what() << '\n';
        return 1;
    }
}
