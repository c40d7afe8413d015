"""A server whose model writes calls and reasoning, for the tests of agents."""

import json

# Qwen3's template in small. It names the script that the model writes: calls where there are tools, an answer after
# their results.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\nCall as <tool_call>{...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{%- if not (hide_last and loop.last) %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- if script %}{{ script }}
{%- elif messages[-1].role == 'tool' %}{{ '<final>' }}
{%- elif tools %}{{ '<calls>' }}
{%- else %}{{ '<plain>' }}{% endif %}
{%- endif %}
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = {"city": 'Kö ln {"}]', "days": 3}
SCRIPTS = {
    "<calls>": "Let me look.\n<tool_call>\n"
    + json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, ensure_ascii=False)
    + '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "<final>": "It is 21 degrees warm there.",
    "<plain>": "A plain answer <tool_cal of the model.",
    "<thought>": "<think>\nThe user wants the weather, so a call is due.\n</think>\n\nI look it up now: "
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>',
    "<think>\n": "Only reasoning stands here first.\n</think>\n\nThen this answer.",
    "<schema>": '{"name": "Rome", "days": 4}',
    "<open>": 'Now:<tool_call>{"name": "now", "arguments": {"a": 5}}</tool_c',
}
HARMONY_TEMPLATE = """\
{%- if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for message in messages %}
{{- '<|start|>' + message.role }}
{%- if message.tool_calls %}{{ '<|channel|>commentary to=functions.' + message.tool_calls[0].function.name }}{% endif %}
{{- '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' + (script or '') }}{% endif %}
"""
HARMONY_SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
# Each marker once: the model continues a token in one way only.
HARMONY_SCRIPTS = {
    "<call>": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome <b>"}<|call|>',
}


def messages(text="How is the weather?"):
    return [{"role": "user", "content": text}]
