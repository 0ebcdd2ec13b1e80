"""Run by test_langchain.py in LangChain's own environment: ChatOpenAI plain, streamed, with tools, with a schema."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


@tool
def get_weather(city: str, days: int) -> str:
    """The weather in a city for some days."""
    return f"{city}: sun for {days} days"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)


def main(base_url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key="none", model=model, temperature=0, max_tokens=200)
    question = "Anna is 31 years old and lives in Prague. What is the weather there for 2 days?"
    plain = chat.invoke(question)
    streamed = "".join(str(chunk.content) for chunk in chat.stream(question))
    called = chat.bind_tools([get_weather], tool_choice="get_weather").invoke(question)
    person = chat.with_structured_output(Person, method="json_schema").invoke(question)
    print(
        json.dumps(
            {
                "plain": plain.content,
                "streamed": streamed,
                "usage": plain.usage_metadata,
                "tool_calls": called.tool_calls,
                "invalid_tool_calls": called.invalid_tool_calls,
                "person": person.model_dump(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
