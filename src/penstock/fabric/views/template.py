"""The page's body as a jinja2 template, and its styles besides those of all pages; no scripts."""

STYLE = """\
body { max-width: 68rem; }
.warning { font-weight: 600; }
.wide table { width: 100%; }
.wide th, .wide td { padding: .3rem .5rem; text-align: right; }
.wide th.left, .wide td.left { text-align: left; padding-left: 0; }
tr.whole td { font-weight: 650; border-bottom: 0; }
figure { margin: 1.4rem 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 36rem; height: auto; }
"""

BODY = """\
<main>
<h1>{{ name }}</h1>
<p class="muted">{{ headings | join(" \u00b7 ") }}</p>
{% for line in warnings %}
<p class="warning">{{ line }}</p>
{% endfor %}
<dl class="figures">
{% for name, value, of in figures %}
<div><dt>{{ name }}</dt><dd class="value">{{ value }}</dd><dd class="of">{{ of }}</dd></div>
{% endfor %}
</dl>

<h2>Transfers, in order of execution</h2>
<div class="wide" tabindex="0"><table>
<tr>{% for head in table[0] %}<th{% if loop.index <= left %} class="left"{% endif %}>
{{- head.split("\\n") | join("<br>" | safe) }}</th>{% endfor %}</tr>
{% for row in table[1:] %}
<tr{% if loop.last %} class="whole"{% endif %}>
{%- for cell in row %}<td{% if loop.index <= left %} class="left"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
<dl class="facts">
{% for name, text in facts %}
<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}
</dl>
{% for note in notes %}
<p class="notes">{{ note }}</p>
{% endfor %}

<h2>Pictures</h2>
{% if not pictures %}
<p class="muted">No trial was completed, so there is nothing to draw.</p>
{% endif %}
{% for caption, picture in pictures %}
<figure><div class="wide" tabindex="0">{{ picture }}</div><figcaption>{{ caption }}</figcaption></figure>
{% endfor %}

<h2>Ranks</h2>
<div class="wide" tabindex="0"><table>
<tr>{% for head in ranks.heads %}<th{% if loop.index <= 2 %} class="left"{% endif %}>{{ head }}</th>{% endfor %}</tr>
{% for row in ranks.rows %}
<tr>{% for cell in row %}<td{% if loop.index <= 2 %} class="left"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>

<h2>What was run, and where</h2>
{% for title, body in environment %}
<details><summary>{{ title }}</summary><pre>{{ body }}</pre></details>
{% endfor %}
</main>
"""
