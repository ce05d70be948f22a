"""The page's jinja2 template, with all of its styles and no scripts."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="penstock fabric">
<title>{{ name }}</title>
<style>
:root { --page: #ffffff; --card: #f6f7f9; --ink: #1b2330; --muted: #5c6573; --rule: #dde1e7; --warn: #fff4e0;
  --warn-ink: #7a4a00; --accent: #0072b2; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --page: #14181f; --card: #1d232c; --ink: #e6e9ee; --muted: #9aa4b2;
  --rule: #333b47; --warn: #3a2c10; --warn-ink: #ffd591; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 68rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; }
.muted, figcaption, .notes { color: var(--muted); }
.notes { font-size: .87rem; }
.warning { background: var(--warn); color: var(--warn-ink); border-radius: .4rem; padding: .6rem .9rem; margin: .8rem 0;
  font-weight: 600; }
.figures { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0 0; padding: 0; }
.figures div { flex: 1 1 9rem; background: var(--card); border-radius: .4rem; padding: .6rem .9rem; }
.figures dt, .figures .of { color: var(--muted); font-size: .85rem; }
.figures dd { margin: 0; }
.figures .value { font-size: 1.45rem; font-weight: 650; line-height: 1.3; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
th.name, td.name { text-align: left; padding-left: 0; }
tr.whole td { font-weight: 650; border-bottom: 0; }
figure { margin: 1.4rem 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 36rem; height: auto; }
figcaption { font-size: .87rem; }
details { border-top: 1px solid var(--rule); padding: .5rem 0; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; background: var(--card); padding: .7rem; border-radius: .4rem; font-size: .8rem; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .8rem 0; }
.facts dt { color: var(--muted); }
.facts dd { margin: 0; }
</style>
</head>
<body>
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
<div class="wide"><table>
<tr><th class="name">transfer</th>{% if kinds %}<th class="name">collective</th>{% endif %}
<th>bytes</th>{% if often %}<th>times</th>{% endif %}<th>min</th><th>p50</th><th>p90</th>
<th>p99</th><th>p99.9</th><th>max</th><th>mean</th><th>skew</th><th>transfer</th><th>algbw<br>{{ unit }}</th>
<th>busbw<br>{{ unit }}</th><th>ideal<br>%</th></tr>
{% for row in table %}
<tr{% if loop.last %} class="whole"{% endif %}>
{%- for cell in row %}<td{% if loop.index <= 1 + kinds %} class="name"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
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
{% if missing %}
<p class="muted">{{ missing }}</p>
{% elif not pictures %}
<p class="muted">No trial was completed, so there is nothing to draw.</p>
{% endif %}
{% for caption, picture in pictures %}
<figure><div class="wide">{{ picture }}</div><figcaption>{{ caption }}</figcaption></figure>
{% endfor %}

<h2>Ranks</h2>
<div class="wide"><table>
<tr>{% for head in ranks.heads %}<th{% if loop.index <= 2 %} class="name"{% endif %}>{{ head }}</th>{% endfor %}</tr>
{% for row in ranks.rows %}
<tr>{% for cell in row %}<td{% if loop.index <= 2 %} class="name"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>

<h2>What was run, and where</h2>
{% for title, body in environment %}
<details><summary>{{ title }}</summary><pre>{{ body }}</pre></details>
{% endfor %}
</body>
</html>
"""
